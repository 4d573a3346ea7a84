"""Selects the files of a data set in a folder or a hub repository, by name; nothing is read. A folder that
`save_to_disk` wrote counts as one file, its state.json.

Publishers put the split into the file's name ("train-00000-of-00004.parquet", "data/test.jsonl"), and a subset into the
folder's ("main/test-00000-of-00001.parquet"). A name is split into words; information that is not in a word is not
guessed. Configurations and splits that a README.md declares go before names: `datasets` says which files these are.
"""

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from os.path import commonprefix
from pathlib import Path, PurePosixPath

from megatron_rft.config.datasets import READ, SAVED, suffix_of
from megatron_rft.utils.errors import DataError, first_line
from megatron_rft.utils.files import temporary_folder

README = "README.md"

SPLITS = {"train": {"train"}, "validation": {"validation", "valid", "val", "dev"}, "test": {"test"}}
NO_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", SAVED, "config.json"}
ASIDE = ((".json", ".csv", ".tsv"), (".txt",))  # beside data of other kinds these are usually none


@dataclass(frozen=True)
class Choice:
    """`part` is the source's key in the recipe; the other fields are those of a recipe's data source."""

    part: str = "train"
    split: str | None = None
    subset: str | None = None
    files: str | None = None


def select(names: Iterable[str], choice: Choice, source: str, readme: Path | None = None) -> list[str]:
    """The selected `names` (relative paths), sorted. `source` is named in errors."""
    every = sorted(_data(list(names)))
    declared = {} if choice.files or readme is None else declared_splits(every, readme, choice.subset, source)
    chosen = [name for name in every if choice.subset is None or _in_subset(name, choice.subset)]
    if choice.files:
        chosen = [name for name in chosen if any(fnmatch(x, choice.files) for x in (name, PurePosixPath(name).name))]
    elif declared:
        wanted = choice.split or choice.part
        splits = [wanted] if wanted in declared else _of_split(sorted(declared), choice, source)
        if not splits:
            there = ", ".join(sorted(declared))
            raise DataError(f"{source}: there is no split {wanted!r} among those that its card declares, {there}")
        chosen = [name for name in every if any(name in declared[split] for split in splits)]
    else:
        chosen = _of_split(chosen, choice, source)
    if not chosen:
        asked = {"of the subset": choice.subset, "of the split": choice.split, "like": choice.files}
        wanted = " ".join(f"{words} {value!r}" for words, value in asked.items() if value) or "of a data set"
        raise DataError(f"{source}: no file {wanted}; {_listed(every)}")
    return _one_kind(chosen, source)


def words(name: str) -> set[str]:
    """ "data/train-00000-of-00002.parquet" -> {data, train, 00000, of, 00002, parquet}"""
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def _of_split(names: list[str], choice: Choice, source: str) -> list[str]:
    """The files that name the split. Without a chosen split, all files if they name at most one."""
    split = choice.split or choice.part
    found = [name for name in names if words(name) & SPLITS.get(split, set()) or words(split) <= words(name)]
    if found or choice.split:
        return found
    named = sorted(known for known, marks in SPLITS.items() if any(words(name) & marks for name in names))
    if len(named) > 1:
        why = f"there is no {split} among its splits, {', '.join(named)}"
        raise DataError(f"{source}: {why}: choose one by data.{split}.split")
    return names


def _data(names: list[str]) -> list[str]:
    """The names of files with rows. Of a folder of `save_to_disk` its state.json, which says which files count."""
    paths = [PurePosixPath(name) for name in names if suffix_of(name)]
    paths = [path for path in paths if not any(p.startswith((".", "_")) for p in path.parts)]
    arrow = {path.parent for path in paths if path.suffix == ".arrow"}
    saved = {path.parent for path in paths if path.name == SAVED} & arrow
    data = [path for path in paths if path.parent not in saved and path.name not in NO_DATA]
    return [*map(str, data), *(str(folder / SAVED) for folder in saved)]


def kind_of(name: str) -> str:
    """The suffix, less .gz; of a folder of `save_to_disk` SAVED."""
    return SAVED if PurePosixPath(name).name == SAVED else suffix_of(name).removesuffix(".gz")


def _in_subset(name: str, subset: str) -> bool:
    path = PurePosixPath(name)
    return subset in path.parts[:-1] or re.fullmatch(re.escape(subset) + r"([^A-Za-z0-9].*)?", path.name) is not None


def _one_kind(names: list[str], source: str) -> list[str]:
    """Selects one format: two formats are usually the same rows twice."""
    rank = {name: next((n for n, kinds in enumerate(ASIDE, 1) if kind_of(name) in kinds), 0) for name in names}
    names = [name for name in names if rank[name] == min(rank.values())]
    kinds = sorted(set(map(kind_of, names)))
    if len(kinds) > 1:
        chosen = commonprefix([name for name in names if kind_of(name) == kinds[-1]]).removesuffix(kinds[-1])
        raise DataError(
            f"{source}: it holds {' and '.join(kinds)} files; say which to read, for example files: "
            f'"{chosen}*{kinds[-1]}"'
        )
    return names


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"there are {shown}" if names else f"there is no {READ} file at all"


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
            for name in names:  # empty files: `datasets` decides as if the whole data set was here
                (folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / "data" / name).touch()
            shutil.copy(readme, folder / "data" / README)
            return _splits(folder / "data", folder / "cache", subset)
    except Exception as error:  # of YAML, datasets, the file system
        raise DataError(
            f"{source}: the configurations of its {README} cannot be used ({first_line(error)}): choose by the option "
            "files which to read"
        ) from None


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
