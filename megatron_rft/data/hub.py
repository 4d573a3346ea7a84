"""What recipes name on the Hugging Face hub: models, and files of data sets, downloaded once into its cache and read
like local ones.

No script of a repository is run, and of a data set nothing but data files is fetched. Without network what is in the
cache already is read from there.
"""

import json
from pathlib import Path

from megatron_rft.config.datasets import HUB_NAME
from megatron_rft.data.selection import Choice, select
from megatron_rft.plan.model_shape import find_model, is_whole
from megatron_rft.utils.errors import DataError

MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
BESIDE = "possible_answer/*"  # read by an adapter next to the file that it belongs to


def download(path: str, choice: Choice) -> list[Path]:
    """The local copies of the chosen files of `hub:organisation/name[@revision]`."""
    named = HUB_NAME.fullmatch(path)
    if named is None:
        raise DataError(f"{path}: a hub name is written hub:organisation/name or hub:organisation/name@revision")
    repository, revision = named["repository"], named["revision"]
    try:
        return _fetch(repository, revision, choice)
    except DataError:
        raise
    except Exception as error:  # of several HTTP libraries, by version
        found = _cached(repository, revision, choice)
        if found is None:
            raise DataError(
                f"{repository} could not be downloaded from the Hugging Face hub ({_reason(error)}): without network, "
                "copy its files here and give their file or folder as the path, with the same adapter"
            ) from None
        return found


def is_here(path: str, option: str = "model.path") -> bool:
    """A folder, or a hub name whose download is in the cache, whole."""
    folder = find_model(path, option)
    return folder is not None and (Path(path).expanduser().is_dir() or is_whole(folder))


def model_folder(path: str, option: str = "model.path") -> Path:
    """The folder of a model: itself, or the download of a hub name, whole."""
    if is_here(path, option):
        return find_model(path, option)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=MODEL_FILES))
    except Exception as error:  # of several HTTP libraries, by version
        raise DataError(
            f"{option}: {path} is no local folder, and could not be downloaded from the Hugging Face hub "
            f"({_reason(error)}): check the name, or give a folder"
        ) from None


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "its terms must be accepted on its page there, and then `hf auth login` here"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is none of this name, or it is private and takes `hf auth login`"
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _fetch(repository: str, revision: str | None, choice: Choice) -> list[Path]:
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().dataset_info(repository, revision=revision)
    names = select((file.rfilename for file in info.siblings), choice, repository)
    wanted = sorted({*names, *(str(Path(name).parent / BESIDE) for name in names)})
    folder = snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=wanted)
    return [Path(folder) / name for name in names]


def _cached(repository: str, revision: str | None, choice: Choice) -> list[Path] | None:
    """What an earlier download left; None where there was none. An interrupted one is not taken for the whole."""
    from huggingface_hub import constants

    store = Path(constants.HF_HUB_CACHE) / f"datasets--{repository.replace('/', '--')}"
    reference = store / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else str(revision)
    folder, listing = store / "snapshots" / commit, store / "trees" / f"{commit}.json"
    if not folder.is_dir():
        return None
    if listing.is_file():
        every = list(json.loads(listing.read_text())["files"])
    else:
        every = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    found = [folder / name for name in select(every, choice, f"{repository} (its copy in {folder})")]
    return found if all(file.is_file() for file in found) else None
