"""Writes a report's files: report.json, report.csv, report.md and report.html."""

from pathlib import Path

from eval import page, tables
from eval.report import Report, to_json


def write(report: Report, folder: Path) -> list[Path]:
    """Write all files into the folder, which is created where it is missing; returns their paths. Each appears whole."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in (
        ("report.json", to_json(report)),
        ("report.csv", tables.to_csv(report)),
        ("report.md", tables.to_markdown(report)),
        ("report.html", page.to_html(report)),
    ):
        path, temporary = folder / name, folder / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
        written.append(path)
    return written
