"""Ends of workers by their peers, by storage and services, and by the collective library."""

from __future__ import annotations

import re

from diagnostics.core.rules.exit_meaning import ExitMeaning, ExitRule
from diagnostics.core.rules.table import Rule
from outlast.failures import FailureClass

PEERS: tuple[ExitRule, ...] = (
    Rule(
        name="program out of step",
        means=ExitMeaning(fault_class=FailureClass.USER_ERROR),
        pattern=re.compile(
            r"Detected mismatch between collectives|ncclInvalidUsage|ncclInvalidArgument|"
            r"device-side assert triggered"
        ),
        matches=(
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running "
            "collective: CollectiveFingerPrint(SequenceNumber=4, OpType=ALLREDUCE)",
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2356, "
            "invalid usage, ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
            "RuntimeError: CUDA error: device-side assert triggered",
        ),
        misses=("RuntimeError: NCCL error: unhandled system error",),
    ),
    Rule(
        name="storage",
        means=ExitMeaning(fault_class=FailureClass.STORAGE),
        pattern=re.compile(
            r"No space left on device|Disk quota exceeded|Stale (?:NFS )?file handle|"
            r"\[Errno 5\] Input/output error|Read-only file system|Transport endpoint is not "
            r"connected|StorageUnavailableError|CorruptCheckpointError|ManifestIncompleteError"
        ),
        matches=(
            "OSError: [Errno 28] No space left on device: '/ckpt/step-40'",
            "OSError: [Errno 116] Stale file handle",
            "OSError: [Errno 5] Input/output error",
            "OSError: [Errno 30] Read-only file system: '/ckpt'",
            "OSError: [Errno 122] Disk quota exceeded",
            "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/fuse'",
            "checkpoint.storage.storage.StorageUnavailableError: file:///ckpt cannot be written",
            "checkpoint.errors.StorageUnavailableError: storage s3://corpora/web: cannot read "
            "train.bin: [Errno 104] Connection reset by peer; asked 9 times in 113 s",
        ),
        misses=(
            "FileNotFoundError: [Errno 2] No such file or directory: 'train.txt'",
            "RuntimeError: Connection closed by peer",
        ),
    ),
    Rule(
        name="service out of reach",
        # Not a cascade: nothing that a peer did, and another try may reach it.
        means=ExitMeaning(fault_class=FailureClass.UNKNOWN, in_stderr=False),
        pattern=re.compile(
            r"^socket\.(?:gaierror|herror): |^ssl\.SSL\w*Error|^urllib\.error\.URLError|"
            r"^http\.client\.(?:RemoteDisconnected|IncompleteRead|BadStatusLine)|"
            r"^urllib3\.exceptions\.|^requests\.exceptions\.(?:\w*Connection|\w*Timeout|SSL|Proxy|"
            r"ChunkedEncoding)|^(?:httpx|httpcore)\.\w*(?:Connect|Read|Write|Network|Timeout|"
            r"Protocol)\w*|^aiohttp\.client_exceptions\.(?:ClientConn|ClientOS|Server)|"
            r"^botocore\.exceptions\.\w*(?:Connect|Timeout)\w*|^[\w.]+LocalEntryNotFoundError: |"
            r"^[\w.]+HTTPError: (?:HTTP Error )?(?:429|5\d\d)\b"
        ),
        matches=(
            "socket.gaierror: [Errno -3] Temporary failure in name resolution",
            "socket.gaierror: [Errno -2] Name or service not known",
            "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>",
            "urllib.error.HTTPError: HTTP Error 503: Service Unavailable",
            "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', "
            "port=443): Max retries exceeded with url: /gpt2 (Caused by NewConnectionError('...: "
            "Failed to establish a new connection: [Errno 111] Connection refused'))",
            "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='x', port=443): Read timed "
            "out. (read timeout=10)",
            "huggingface_hub.errors.HfHubHTTPError: 504 Server Error: Gateway Time-out for url",
            "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to "
            "locate the file on the Hub and we cannot find the requested files in the local cache.",
            "httpx.ConnectError: [Errno -2] Name or service not known",
            "botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL",
            "ssl.SSLEOFError: EOF occurred in violation of protocol (_ssl.c:1006)",
        ),
        misses=(
            # These are answers, and come again.
            "urllib.error.HTTPError: HTTP Error 404: Not Found",
            "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://x",
            "requests.exceptions.MissingSchema: Invalid URL 'x': No scheme supplied.",
            "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
            "ConnectionResetError: [Errno 104] Connection reset by peer",
        ),
    ),
    Rule(
        name="peer connection lost",
        means=ExitMeaning(fault_class=FailureClass.CASCADE),
        pattern=re.compile(
            r"Connection (?:was )?(?:likely )?(?:reset|closed)(?: by (?:remote )?peer)?|"
            r"Connection refused|Broken pipe|ncclRemoteError|ncclSystemError|"
            r"unhandled system error|"
            r"recvValueWithTimeout failed|failed to recv, got 0 bytes|"
            r"Application timeout caused pair closure|remote process (?:exited|has terminated)|"
            r"^(?:ConnectionError|ConnectionResetError|BrokenPipeError|ConnectionAbortedError)\b|"
            r"Socket closed"
        ),
        matches=(
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
            "Connection closed by peer [127.0.0.1]:24988. This is typically caused by a remote "
            "worker crashing. Check the logs of the remote worker before reporting an error.",
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
            "Read error [127.0.0.1]:35756: Connection reset by peer.",
            "torch.distributed.DistNetworkError: Connection was likely closed. Did the remote "
            "server shutdown or crash?",
            "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
            "RuntimeError: Application timeout caused pair closure",
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote "
            "process exited or there was a network error, NCCL version 2.21.5",
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1331, "
            "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process "
            "exiting prematurely.",
            "socketProgressOpt: Call to recv from 10.0.0.7<4341> failed : Connection reset by peer",
            "ConnectionResetError: [Errno 104] Connection reset by peer",
            "BrokenPipeError: [Errno 32] Broken pipe",
        ),
        misses=(
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x5 and 2x3)",
            "ValueError: I/O operation on closed file",
        ),
    ),
    Rule(
        name="waited for a peer in vain",
        means=ExitMeaning(fault_class=FailureClass.CASCADE),
        pattern=re.compile(
            r"Timed out waiting \d+ ?ms for (?:recv|send) operation|"
            r"collective operation timeout: WorkNCCL|"
            r"client socket has (?:timed out|failed to connect)|DistStoreError|"
            r"wait timeout after \d+ ?ms"
        ),
        matches=(
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
            "unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1204, "
            "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000)",
            "torch.distributed.DistNetworkError: The client socket has timed out after 1000ms "
            "while trying to connect to (127.0.0.1, 1).",
            "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0",
        ),
        misses=("TimeoutError: my data loader took too long",),
    ),
    Rule(
        name="collective library",
        means=ExitMeaning(fault_class=FailureClass.NCCL),
        pattern=re.compile(
            r"ncclInternalError|ncclUnhandledCudaError|NCCL error|"
            r"NCCL WARN|NET/IB ?: Got completion|NET/IB ?: .*[Aa]sync fatal event|"
            r"DistBackendError"
        ),
        matches=(
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1331, "
            "internal error - please report this issue to the NCCL developers",
            "ncclInternalError: Internal check failed.",
            "node7:81:142 [0] transport/net_ib.cc:1280 NCCL WARN NET/IB : Got completion from peer "
            "10.0.0.9<38172> with status=12 opcode=129 len=0 vendor err 129",
            "NET/IB : mlx5_2:1 async fatal event on CQ (0x7f40): CQ error",
        ),
        misses=("NCCL version 2.21.5+cuda12.4", "RuntimeError: No backend type associated"),
    ),
)
