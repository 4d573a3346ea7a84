"""Files that somebody else may be reading, or that a full disk must not leave half-written."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Aside, then under its name: whoever finds it finds all of it. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
