"""Where a checkpoint's files are, and which tensors they hold.

Owns the way from a model's name to tensors on disk; must not know what a tensor means. A checkpoint whose files
contradict each other is refused before a weight is read: a stale tensor would not fail later, only answer wrongly."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from tqdm import tqdm

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"


def resolve(model: str, revision: str | None = None) -> Path:
    """Return the folder of `model`: an existing folder as it is, else the hub repository `owner/name`, cached. Nothing
    that holds code is fetched. HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and HF_TOKEN are huggingface_hub's. Raises
    ValueError (no such folder, repository or revision, no access, no config.json) or ConnectionError (no copy)."""
    folder = Path(model).expanduser()
    if model and folder.is_dir():  # Path("") would be the working directory
        if revision is not None:
            raise ValueError(f"{folder} is a local folder and has no revision {revision!r}; leave revision out")
    elif not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        raise ValueError(f"no model {model!r}: no folder {folder.absolute()}, and not a hub id (owner/name)")
    else:
        from huggingface_hub import errors, snapshot_download  # here, because a local folder needs none of it
        name = model if revision is None else f"{model} at revision {revision}"
        tried = f"tried the folder {folder.absolute()} and the hub"
        wanted, others = ["*.safetensors", "*.json", "*.jinja"], ["*/*", "consolidated*"]  # other formats of the same
        try:
            folder = Path(snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=others))
        except errors.GatedRepoError as error:
            raise ValueError(f"{name} is gated ({tried}): accept its terms there, then set HF_TOKEN") from error
        except errors.RevisionNotFoundError as error:
            raise ValueError(f"{model} has no revision {revision} ({tried}); check branch, tag or commit") from error
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            raise ValueError(f"no model {model} ({tried}); check the id, or set HF_TOKEN if it is private") from error
        except Exception as error:  # whatever else goes wrong comes from the network, the hub or the disk
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConnectionError(f"{name} is not in the cache and cannot be fetched ({tried}: {reason}); go online "
                                  "(is HF_HUB_OFFLINE set?), or pass a folder") from error
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: not a Hugging Face checkpoint folder, or an incomplete one")
    return folder


def read_json(folder: Path, name: str) -> dict:
    """Return the object in a JSON file; {} where there is no such file. ValueError names a file that holds none."""
    path = Path(folder) / name
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} where an object belongs; fetch it again")
    return content


class Checkpoint:
    """The safetensors files of one folder, checked against their index, and the tensors in them.
    files: those that count, in name order: the index's, else `model.safetensors`; others in the folder are ignored
    shapes, dtypes: by tensor name; a dtype as safetensors spells it ("BF16", "F32")
    Raises ValueError if files are absent, damaged, or at odds with the index, naming the file and the tensor."""

    def __init__(self, folder: Path):
        self.folder, weight_map = Path(folder), {}  # tensor name -> the shard it is in; {} where one file holds all
        if (self.folder / INDEX_NAME).is_file():
            weight_map = read_json(self.folder, INDEX_NAME).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ValueError(f"{self.folder / INDEX_NAME} has no weight_map; fetch it again")
            for name, shard in weight_map.items():
                if not isinstance(shard, str) or not (self.folder / shard).is_file():
                    raise ValueError(f"{self.folder}/{shard} is missing, where {INDEX_NAME} puts {name}; fetch it")
        elif not (self.folder / SINGLE_NAME).is_file():
            kinds = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
            present = sorted(path.name for path in self.folder.iterdir() if path.suffix in kinds)
            raise ValueError(f"{self.folder} has neither {INDEX_NAME} nor {SINGLE_NAME}, only {present}; samebits "
                             "reads only safetensors, one file or shards with their index: fetch or convert")
        self.files = [self.folder / name for name in sorted(set(weight_map.values())) or [SINGLE_NAME]]
        self.shapes, self.dtypes, file_of = {}, {}, {}  # by tensor name
        for file in self.files:
            for name, view in read_slices(file):
                if file_of.setdefault(name, file.name) != file.name:
                    raise ValueError(f"tensor {name} is in both {file_of[name]} and {file.name} of {self.folder}; "
                                     "which one counts is anyone's guess: fetch the checkpoint again")
                self.shapes[name], self.dtypes[name] = tuple(view.get_shape()), view.get_dtype()
        for name, shard in weight_map.items():
            if file_of.get(name) != shard:
                raise ValueError(f"{INDEX_NAME} of {self.folder} puts tensor {name} in {shard}, which lacks it; "
                                 "the index and the shards are of different revisions: fetch both again")

    def tensors(self, progress: bool = True) -> Iterator[tuple[str, object]]:
        """Yield (name, slice) of every tensor, file by file, in the order of their bytes. `slice[a:b]` reads those
        rows as a torch tensor over the mapped file; index it before taking the next: the file is closed at its end."""
        views = (pair for file in self.files for pair in read_slices(file))  # shown seldom, for the sake of log files:
        yield from tqdm(views, "loading weights", len(self.shapes), disable=not progress, mininterval=0.5)


def read_slices(file: Path) -> Iterator[tuple[str, object]]:
    """`Checkpoint.tensors` of one file; ValueError names one that is damaged (its length must match its header)."""
    try:
        with safe_open(file, framework="pt") as handle:
            for name in handle.offset_keys():
                yield name, handle.get_slice(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is truncated or corrupt ({error}); delete it and fetch it again") from error
