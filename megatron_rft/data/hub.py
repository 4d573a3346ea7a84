"""Models and data files on the Hugging Face hub, downloaded once into its cache and read like local ones.

No script of a repository is run, and of a data set only data files are downloaded. Without network the cache is
used. `datasets` reads the files, and says what a README.md declares; it could load a name of the hub itself, but for
offline use it keeps a converted copy of every split, it converts values of text, and adapters need the published files
with their names.

The hub limits the rate of requests, so one rank of a node asks it, and the others then read the cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from megatron_rft.config.datasets import HUB_NAME, SAVED
from megatron_rft.data.fields import Streamed
from megatron_rft.data.selection import README, Choice, select
from megatron_rft.plan.model_shape import find_model, is_whole
from megatron_rft.utils.errors import DataError, first_line
from megatron_rft.utils.files import one_of_node

MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def download(path: str, choice: Choice) -> list[Path]:
    """The local copies of the chosen files of `hub:organisation/name[@revision]`.

    Raises:
        DataError: the hub cannot be reached and the cache lacks some of the files, or no file matches.
    """
    from huggingface_hub import snapshot_download

    where = _where(path)
    with _explained(path), one_of_node(f"{path} {choice}") as ask:
        names, copy = _file_names(where, ask)
        source = f"{where['repo_id']} (its copy in {copy})" if copy else where["repo_id"]
        names = select(names, choice, source, _readme(where, names, local_files_only=copy is not None))
        wanted = [*map(escape, names)]
        wanted += [f"{escape(name.removesuffix(SAVED))}*" for name in names if name.endswith(SAVED)]
        folder = Path(snapshot_download(**where, allow_patterns=wanted, local_files_only=copy is not None))
    return [folder / name for name in names]


def addresses(path: str, choice: Choice) -> list[Streamed]:
    """The chosen files of a hub name, to be read over the network.

    Raises:
        DataError: the hub cannot be reached, no file matches, or they cannot be read in parts.
    """
    from huggingface_hub import HfApi

    where = _where(path)
    with _explained(path):
        info = HfApi().dataset_info(where["repo_id"], revision=where["revision"])
        names = [file.rfilename for file in info.siblings]
        names = select(names, choice, where["repo_id"], _readme(where, names))
    if any(name.endswith(SAVED) for name in names):
        raise DataError(f"{path}: a folder of save_to_disk cannot be streamed: leave out streaming")
    return [Streamed(f"hf://datasets/{where['repo_id']}@{info.sha}/{name}") for name in names]


def _where(path: str) -> dict[str, str | None]:
    named = HUB_NAME.fullmatch(path)
    return {"repo_id": named["repository"], "repo_type": "dataset", "revision": named["revision"]}


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # of several HTTP libraries, by version
        raise DataError(
            f"{_where(path)['repo_id']} could not be downloaded from the Hugging Face hub ({_reason(error)}): without "
            "network, copy its files here and give their file or folder as the path, with the same adapter"
        ) from None


def _readme(where: dict[str, str | None], names: list[str], **options: bool) -> Path | None:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(filename=README, **where, **options)) if README in names else None


def _file_names(where: dict[str, str | None], ask: bool) -> tuple[list[str], Path | None]:
    """All files of the repository. Without `ask`, or if the hub cannot be reached: those of the last download, and its
    folder."""
    from huggingface_hub import HfApi, errors, get_cached_repo_tree, snapshot_download

    try:
        if not ask:
            raise DataError(f"another rank of this node could not download {where['repo_id']}")
        info = HfApi().dataset_info(where["repo_id"], revision=where["revision"])
        return [file.rfilename for file in info.siblings], None
    except Exception as error:
        try:
            folder = Path(snapshot_download(**where, allow_patterns=[], local_files_only=True))
        except errors.LocalEntryNotFoundError:
            raise error from None
    return [file.path for file in get_cached_repo_tree(**where)], folder


def is_here(path: str, option: str = "model.path") -> bool:
    """Whether this is a folder, or a hub name whose download in the cache is complete."""
    folder = find_model(path, option, MODEL_FILES)
    return folder is not None and (Path(path).expanduser().is_dir() or is_whole(folder))


def model_folder(path: str, option: str = "model.path") -> Path:
    """The folder of a model: the given folder, or the complete download of a hub name."""
    if is_here(path, option):
        return find_model(path, option)
    from huggingface_hub import snapshot_download

    try:
        with one_of_node(path) as ask:
            return Path(snapshot_download(path, allow_patterns=list(MODEL_FILES), local_files_only=not ask))
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
    return first_line(error)
