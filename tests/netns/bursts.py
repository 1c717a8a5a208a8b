"""Sends a burst over each rail four times a second: `python -m tests.netns.bursts FOLDER COUNT`.

Over one that has a file of its name in the folder nothing goes.
"""

import socket
import sys
import time
from pathlib import Path

BURSTS = 250
SIZE = 8192


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        due_s = time.monotonic()
        while True:
            for number in range(count):
                if not (folder / f"rail{number}").exists():
                    for _ in range(BURSTS):
                        sender.sendto(bytes(SIZE), (f"10.231.{78 + number}.2", 9))
            due_s += 0.25
            time.sleep(max(0.0, due_s - time.monotonic()))


if __name__ == "__main__":
    main()
