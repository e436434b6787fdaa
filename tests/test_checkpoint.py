"""checkpoint.py: local folders, the hub (a stand-in on 127.0.0.1), and every way shards can contradict an index.

Row numbers are those of the field bugs list, section G: what users of other engines hit.
"""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import checkpoint

ROOT = Path(__file__).parents[1]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_sharded(folder: Path) -> dict[str, torch.Tensor]:
    """Write two shards with their index; return all tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(64, 32, generator=generator) for name in ("a.weight", "b.weight", "c.weight")}
    tensors["c.weight"] = tensors["c.weight"].bfloat16()
    shards = {FIRST: ["a.weight", "c.weight"], SECOND: ["b.weight"]}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / shard)
    write_index(folder, {name: shard for shard, names in shards.items() for name in names})
    return tensors


def write_index(folder: Path, weight_map: dict) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_are_read_whole_and_in_slices(tmp_path):
    tensors = make_sharded(tmp_path)
    found = checkpoint.Checkpoint(tmp_path)
    assert found.shapes == {name: (64, 32) for name in tensors}
    assert found.dtypes == {"a.weight": "F32", "b.weight": "F32", "c.weight": "BF16"}
    seen = {}
    for name, view in found.tensors(progress=False):
        seen[name] = (view[:], view[16:32])
    assert list(seen) == [name for name, _ in found.tensors(progress=False)] and set(seen) == set(tensors)
    for name, (whole, rows) in seen.items():  # read after every file was closed
        assert whole.dtype == tensors[name].dtype and torch.equal(whole, tensors[name])
        assert torch.equal(rows, tensors[name][16:32])


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="sees open and mapped files through /proc")
def test_no_file_stays_open(tmp_path):
    make_sharded(tmp_path)

    def count_open():
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum(str(tmp_path) in line for line in links + Path("/proc/self/maps").read_text().splitlines())

    views = checkpoint.Checkpoint(tmp_path).tensors(progress=False)
    name, view = next(views)
    assert count_open() > 0
    del view
    views.close()  # a caller that gives up half-way
    assert count_open() == 0


def test_progress_goes_to_stderr_and_counts_every_tensor(tmp_path, capsys):
    make_sharded(tmp_path)
    assert len(list(checkpoint.Checkpoint(tmp_path).tensors())) == 3
    captured = capsys.readouterr()
    assert captured.out == "" and "100%" in captured.err and "3/3" in captured.err


def test_single_file(tmp_path):
    save_file({"x": torch.arange(6).reshape(2, 3)}, tmp_path / "model.safetensors")
    found = checkpoint.Checkpoint(tmp_path)
    assert found.shapes == {"x": (2, 3)} and found.dtypes == {"x": "I64"}
    assert found.files == [tmp_path / "model.safetensors"]


def test_row_113_index_names_an_absent_shard(tmp_path):
    make_sharded(tmp_path)
    (tmp_path / SECOND).unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing.*b\.weight"):
        checkpoint.Checkpoint(tmp_path)
    write_index(tmp_path, {"a.weight": 1})
    with pytest.raises(ValueError, match=r"/1 is missing.*a\.weight"):
        checkpoint.Checkpoint(tmp_path)


@pytest.mark.parametrize("name, shard", [("d.weight", FIRST), ("a.weight", SECOND)])  # in no shard; in another one
def test_index_names_a_tensor_its_shard_lacks(tmp_path, name, shard):
    make_sharded(tmp_path)
    write_index(tmp_path, json.loads((tmp_path / INDEX).read_text())["weight_map"] | {name: shard})
    with pytest.raises(ValueError, match=f"{name} in {shard}, which lacks it"):
        checkpoint.Checkpoint(tmp_path)


def test_one_tensor_in_two_shards(tmp_path):
    tensors = make_sharded(tmp_path)
    save_file({name: tensors[name] for name in ("b.weight", "c.weight")}, tmp_path / SECOND)
    with pytest.raises(ValueError, match=r"c\.weight is in both model-00001\S* and model-00002"):
        checkpoint.Checkpoint(tmp_path)


def test_row_115_stray_files_are_ignored(tmp_path):
    tensors = make_sharded(tmp_path)
    for stray in ("model.safetensors", "consolidated.safetensors", "model-00003-of-00002.safetensors"):
        save_file({"a.weight": torch.zeros(64, 32)}, tmp_path / stray)
    found = checkpoint.Checkpoint(tmp_path)
    assert [file.name[:11] for file in found.files] == ["model-00001", "model-00002"]
    assert torch.equal({name: view[:] for name, view in found.tensors(progress=False)}["a.weight"], tensors["a.weight"])


@pytest.mark.parametrize("keep", [0, 4, 100, -4096, -1])
def test_row_116_truncated_shard(tmp_path, keep):
    make_sharded(tmp_path)
    shard = tmp_path / FIRST
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors is truncated or corrupt"):
        checkpoint.Checkpoint(tmp_path)


def test_bin_only_folder_is_refused_by_name(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*reads only safetensors"):
        checkpoint.Checkpoint(tmp_path)


def test_shards_without_an_index_are_refused(tmp_path):
    make_sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors\.index\.json nor.*model-00001"):
        checkpoint.Checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_broken_index_is_refused(tmp_path, content):
    make_sharded(tmp_path)
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ValueError, match=INDEX + " (is not valid|holds a list|has no weight_map)"):
        checkpoint.Checkpoint(tmp_path)


def test_read_json(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert checkpoint.read_json(tmp_path, "config.json") == {"a": 1}
    assert checkpoint.read_json(tmp_path, "generation_config.json") == {}


def test_resolve_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no config\.json"):
        checkpoint.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint.resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="revision 'main'"):
        checkpoint.resolve(str(tmp_path), revision="main")
    for name in ("gone", str(tmp_path / "gone"), "./a/b", "a/b/c", ""):
        with pytest.raises(ValueError, match=r"no folder .* not a hub id|no config\.json") as info:
            checkpoint.resolve(name)
        assert "\n" not in str(info.value)


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
    """The few routes of a model hub that a snapshot download asks for, serving one repository `tiny/model`."""

    def do_GET(self):
        files, path = self.server.files, self.path.partition("?")[0]
        self.server.paths.append(path)
        if path == "/api/models/tiny/model/revision/main":
            siblings = [{"rfilename": name} for name in files]
            self.reply(json.dumps({"id": "tiny/model", "modelId": "tiny/model", "sha": COMMIT, "siblings": siblings}))
        elif path == f"/api/models/tiny/model/tree/{COMMIT}":
            self.reply(json.dumps([{"type": "file", "path": name, "size": len(data), "oid": digest(data)}
                                   for name, data in files.items()]))
        elif path.startswith(f"/tiny/model/resolve/{COMMIT}/") and (name := path.split("/", 5)[5]) in files:
            self.reply(files[name], ETag=f'"{digest(files[name])}"', **{"X-Repo-Commit": COMMIT})
        else:
            repo = path.split("/")[3:4]
            code = {("gated",): "GatedRepo", ("tiny",): "RevisionNotFound"}.get(tuple(repo), "RepoNotFound")
            self.reply("", 403 if code == "GatedRepo" else 404, **{"X-Error-Code": code})

    do_HEAD = do_GET

    def reply(self, body, status=200, **headers):
        body = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    """A running stand-in hub; `.files` is what it has, `.paths` what it was asked for."""
    save_file({"x": torch.ones(2)}, tmp_path / "made.safetensors")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.paths = []
    server.files = {"config.json": b"{}", "chat_template.jinja": b"hi", "README.md": b"#",
                    "model.safetensors": (tmp_path / "made.safetensors").read_bytes(), "pytorch_model.bin": b"bin",
                    "weights.pt": b"pt", "modeling_tiny.py": b"raise SystemExit", "original/params.json": b"{}",
                    "consolidated.safetensors": b"twice"}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def resolve_in_subprocess(tmp_path: Path, hub, *args: str, **environment: str) -> str:
    """Run `checkpoint.resolve(*args)` in its own process (huggingface_hub reads its settings once, at import)."""
    code = ("import sys, checkpoint\ntry: print('folder', checkpoint.resolve(*sys.argv[1:]))\n"
            "except (ValueError, ConnectionError) as error: print(type(error).__name__, error)")
    clean = {key: text for key, text in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    settings = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1",
                "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env=clean | settings | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_hub_download_then_offline_from_the_cache(tmp_path, hub):
    online = resolve_in_subprocess(tmp_path, hub, "tiny/model")
    folder = Path(online.removeprefix("folder "))
    assert sorted(path.name for path in folder.iterdir()) == ["chat_template.jinja", "config.json", "model.safetensors"]
    assert checkpoint.Checkpoint(folder).shapes == {"x": (2,)}
    fetched = {path.rpartition("/")[2] for path in hub.paths if "/resolve/" in path}
    assert fetched == {"chat_template.jinja", "config.json", "model.safetensors"}  # no .bin, .pt or .py even asked for
    hub.paths.clear()
    assert resolve_in_subprocess(tmp_path, hub, "tiny/model", HF_HUB_OFFLINE="1") == online
    assert hub.paths == []


def test_hub_errors_are_one_line_that_says_what_to_do(tmp_path, hub):
    cases = {
        ("tiny/model",): ("ConnectionError tiny/model is not in the cache", "HF_HUB_OFFLINE", {"HF_HUB_OFFLINE": "1"}),
        ("other/model",): ("ValueError no model other/model", "check the id", {}),
        ("gated/model",): ("ValueError gated/model is gated", "HF_TOKEN", {}),
        ("tiny/model", "v9"): ("ValueError tiny/model has no revision v9", "check branch", {}),
    }
    for args, (start, remedy, environment) in cases.items():
        said = resolve_in_subprocess(tmp_path, hub, *args, **environment)
        assert said.startswith(start) and remedy in said and "\n" not in said, said
    said = resolve_in_subprocess(tmp_path, hub, "tiny/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert said.startswith("ConnectionError tiny/model is not in the cache")
