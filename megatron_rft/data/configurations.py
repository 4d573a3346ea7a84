"""The configurations and splits that the README.md of a data set declares, by `datasets`, from the names of its files
alone; nothing is read."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from megatron_rft.utils.errors import DataError, first_line
from megatron_rft.utils.files import temporary_folder

README = "README.md"


def declared_splits(names: Iterable[str], readme: Path, subset: str | None, source: str) -> dict[str, list[str]]:
    """The files of each split of the configuration `subset`; without one, of the default or of all configurations.
    Empty if the README declares no such configuration: names then say what belongs to it.

    Raises:
        DataError: the README declares files that are not there.
    """
    from huggingface_hub import metadata_load

    try:
        if not (readme.is_file() and (metadata_load(readme) or {}).get("configs")):
            return {}
        with temporary_folder() as folder:
            _mirror(names, readme, folder / "data")
            return _splits(folder / "data", folder / "cache", subset)
    except Exception as error:  # of YAML, datasets, the file system
        raise DataError(
            f"{source}: the configurations of its {README} cannot be used ({first_line(error)}): choose by the option "
            "files which to read"
        ) from None


def _mirror(names: Iterable[str], readme: Path, folder: Path) -> None:
    """Empty files with these names: `datasets` decides as if the whole data set was here."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    shutil.copy(readme, folder / README)


def _splits(folder: Path, cache: Path, subset: str | None) -> dict[str, list[str]]:
    import datasets

    every = datasets.get_dataset_config_names(str(folder))
    default = datasets.get_dataset_default_config_name(str(folder))
    chosen = [subset] if subset else [default] if default else every
    splits: dict[str, list[str]] = {}
    for name in [name for name in chosen if name in every]:
        files = datasets.load_dataset_builder(str(folder), name, cache_dir=str(cache)).config.data_files
        for split, paths in files.items():
            splits.setdefault(str(split), []).extend(str(Path(path).relative_to(folder)) for path in paths)
    return splits
