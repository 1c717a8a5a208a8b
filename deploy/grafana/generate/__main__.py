"""`python -m deploy.grafana.generate` writes the dashboards anew."""

from __future__ import annotations

from pathlib import Path

from deploy.grafana.generate.catalogue import documents

FOLDER = Path(__file__).resolve().parents[1] / "dashboards"


def main() -> None:
    """Write every dashboard, and remove what is none any more."""
    wanted = documents()
    for path in FOLDER.glob("*.json"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
