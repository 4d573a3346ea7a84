"""The hub's own client against a local server that implements the download part of its protocol."""

import gzip
import hashlib
import io
import json
import re
import shutil
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import HfFileSystem, constants

from megatron_rft.data.hub import is_here, model_folder
from megatron_rft.data.rows import load_rows
from megatron_rft.plan.model_shape import find_model
from megatron_rft.utils.errors import DataError

SHA = "5" * 40


def line(**row) -> bytes:
    return (json.dumps(row) + "\n").encode()


FILES = {
    "README.md": b"---\n---\n",
    "load.py": b"raise SystemExit('a script of the repository was run')\n",
    "main/train-00000-of-00002.jsonl": line(question="1+1?", answer="2"),
    "main/train-00001-of-00002.jsonl": line(question="1+2?", answer="3"),
    "main/test.jsonl": line(question="2+2?", answer="4"),
    "hard/test.jsonl": line(question="99+99?", answer="198"),
}


MODEL = {
    "README.md": b"---\n---\n",
    "config.json": b'{"model_type": "qwen3"}',
    "model-00001-of-00002.safetensors": b"one half",
    "model-00002-of-00002.safetensors": b"the other",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {part: f"model-0000{part}-of-00002.safetensors" for part in "12"}}
    ).encode(),
}
CARD = b"""---
configs:
- config_name: sums
  default: true
  data_files:
  - {split: train, path: "a/*.parquet"}
  - {split: held_out, path: b/*}
- config_name: lines
  data_files: c/rows.jsonl.gz
- config_name: more
  data_files: c/one.txt
---
"""
TABLE = pyarrow.Table.from_pylist([{"question": f"{n}+{n}?", "answer": n} for n in range(5000)])


def parquet(table) -> bytes:
    with io.BytesIO() as file:
        pyarrow.parquet.write_table(table, file, row_group_size=1000, compression=None)
        return file.getvalue()


DECLARED = {
    "README.md": CARD,
    "a/x 1.parquet": parquet(TABLE),
    "b/y.parquet": parquet(TABLE[7:17]),
    "c/rows.jsonl.gz": gzip.compress(line(question="3+3?", answer="6") * 7),
    "c/one.txt": b"1+1?\n2+2?\n",
    "c/train.parquet": parquet(TABLE[:1]),
}
REPOSITORIES = {"datasets/org/sums": FILES, "models/org/tiny": MODEL, "datasets/org/declared": DECLARED}


class Hub(BaseHTTPRequestHandler):
    asked: list[str] = []

    def do_GET(self):
        path = unquote(self.path.partition("?")[0])
        self.asked.append(path)
        for name, content in REPOSITORIES.items():
            url = f"/{name.removeprefix('models/')}/resolve/"
            if path.startswith(f"/api/{name}/revision/") or path == f"/api/{name}":
                files = [{"rfilename": file} for file in content]
                return self._send(json.dumps({"id": name.partition("/")[2], "sha": SHA, "siblings": files}).encode())
            if path.startswith(f"/api/{name}/tree/"):
                folder = path.removeprefix(f"/api/{name}/tree/").partition("/")[2]
                files = [{"type": "file", "path": file, "size": len(d), "oid": file} for file, d in content.items()]
                files = [file for file in files if file["path"].startswith(folder)]
                return self._send(json.dumps(files).encode())
            if path.startswith(url) and (file := path.removeprefix(url).partition("/")[2]) in content:
                return self._send(content[file])
        self.send_error(404)

    do_HEAD = do_GET

    def do_POST(self):
        """What there is at some paths."""
        name = self.path.partition("/paths-info/")[0].removeprefix("/api/")
        paths = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
        files = [
            {"type": "file", "path": p, "size": len(d), "oid": p} for p, d in REPOSITORIES[name].items() if p in paths
        ]
        folders = {p for p in paths if any(file.startswith(f"{p}/") for file in REPOSITORIES[name])}
        self._send(json.dumps(files + [{"type": "directory", "path": p, "oid": p} for p in folders]).encode())

    def _send(self, data: bytes):
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {span[1]}-{span[2]}/{len(data)}")
            data = data[int(span[1]) : int(span[2]) + 1]
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint(monkeypatch, tmp_path):
    """Switches the client to an endpoint and to an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)

    def use(url: str):
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
        HfFileSystem.clear_instance_cache()
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template)

    use("http://127.0.0.1:9")
    return use


@pytest.fixture
def server(endpoint):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.asked.clear()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint(f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_split_of_a_subset_is_downloaded_once_and_nothing_else(server, endpoint):
    rows = load_rows("hub:org/sums", subset="main", part="train")
    assert [row["answer"] for row in rows] == ["2", "3"]
    assert not any("load.py" in path or "test" in path for path in Hub.asked)
    endpoint("http://127.0.0.1:9")  # without network: what is in the cache
    assert load_rows("hub:org/sums", subset="main", part="train") == rows
    with pytest.raises(DataError, match="org/sums could not be downloaded"):  # this one never was
        load_rows("hub:org/sums", "test", subset="hard")
    with pytest.raises(DataError, match="its copy in .*: no file of the subset 'easy'"):
        load_rows("hub:org/sums", "test", subset="easy")


def test_configurations_and_splits_that_the_card_declares(server, endpoint):
    rows = TABLE.to_pylist()
    assert load_rows("hub:org/declared") == rows
    held_out = rows[7:17]
    assert load_rows("hub:org/declared", "held_out", subset="sums") == held_out
    assert load_rows("hub:org/declared", subset="lines") == [{"question": "3+3?", "answer": "6"}] * 7
    assert load_rows("hub:org/declared", subset="more") == [{"text": "1+1?"}, {"text": "2+2?"}]
    assert load_rows("hub:org/declared", files="c/*.parquet") == rows[:1]  # declared or not
    endpoint("http://127.0.0.1:9")  # without network: what is in the cache, chosen in the same way
    assert load_rows("hub:org/declared") == rows and load_rows("hub:org/declared", "held_out") == held_out
    assert load_rows("hub:org/declared", "train[:80%]") == rows[:4000]
    assert load_rows("hub:org/declared", "train[-3:]+held_out[:30%]", limit=4) == [*rows[-3:], held_out[0]]
    with pytest.raises(DataError, match="no split 'dev' among those that its card declares, held_out, train"):
        load_rows("hub:org/declared", "dev")


def test_a_stream_reads_the_first_rows_and_writes_nothing(server, endpoint, tmp_path):
    assert load_rows("hub:org/declared", limit=3, streaming=True) == TABLE[:3].to_pylist()
    lines = load_rows("hub:org/declared", None, 5, subset="lines", streaming=True)
    assert lines == [{"question": "3+3?", "answer": "6"}] * 5
    assert load_rows("hub:org/sums", "test", 1, subset="hard", streaming=True)[0]["answer"] == "198"
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.suffix in (".parquet", ".jsonl", ".gz")]
    endpoint("http://127.0.0.1:9")
    with pytest.raises(DataError, match="org/declared could not be downloaded .*without network, copy its files here"):
        load_rows("hub:org/declared", limit=3, streaming=True)


def test_an_interrupted_download_is_not_taken_for_the_whole(server, endpoint, tmp_path):
    rows = load_rows("hub:org/sums@v1", subset="main", part="train")
    assert any("/revision/v1" in path for path in Hub.asked)
    endpoint("http://127.0.0.1:9")
    (shard,) = (tmp_path / "cache").rglob("train-00001-of-00002.jsonl")
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(DataError, match="org/sums could not be downloaded .*1 file.* missing"):
        load_rows("hub:org/sums@v1", subset="main", part="train")
    shard.write_bytes(content)
    shutil.rmtree(*(tmp_path / "cache").rglob("trees"))  # as downloads of older versions of huggingface_hub are
    assert load_rows("hub:org/sums@v1", subset="main", part="train") == rows


def test_what_is_not_there_is_listed(server):
    with pytest.raises(DataError, match="no file of the split 'dev'; there are hard/test.jsonl, main/test.jsonl"):
        load_rows("hub:org/sums", "dev")
    with pytest.raises(DataError, match="there is no validation among its splits, test, train"):
        load_rows("hub:org/sums", part="validation")
    with pytest.raises(DataError, match="org/none could not be downloaded .*404"):
        load_rows("hub:org/none")


def test_without_network_a_local_copy_is_asked_for(endpoint):
    with pytest.raises(DataError, match="org/sums could not be downloaded .*give their file or folder as the path"):
        load_rows("hub:org/sums@v1", adapter="math")


def test_a_model_is_downloaded_once_and_a_download_that_was_cut_off_is_finished(server, endpoint):
    folder = model_folder("org/tiny")
    assert {file.name for file in folder.iterdir()} == set(MODEL) - {"README.md"}
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert model_folder("org/tiny") == folder
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"the other"
    endpoint("http://127.0.0.1:9")  # without network: what is in the cache
    Hub.asked.clear()
    assert model_folder("org/tiny") == folder and Hub.asked == []
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DataError, match="org/tiny is no local folder, and could not be downloaded .*1 file.* missing"):
        model_folder("org/tiny")


def test_a_tokenizer_alone_in_the_cache_is_no_model(server, endpoint):
    folder = model_folder("org/tiny")
    endpoint("http://127.0.0.1:9")
    assert find_model("org/tiny") == folder and is_here("org/tiny")
    (folder / "config.json").unlink()
    assert find_model("org/tiny") is None and not is_here("org/tiny")
    assert find_model("org--x/tiny") is None  # no name that the hub allows


def test_a_model_that_is_not_there_is_one_sentence(server):
    with pytest.raises(DataError) as told:
        model_folder("org/none", "critic.path")
    assert str(told.value).startswith("critic.path: org/none is no local folder, and could not be downloaded")
    assert "check the name" in str(told.value) and "\n" not in str(told.value)


def test_one_rank_of_a_node_asks_the_hub(server, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in {"LOCAL_RANK": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    rows, folder = load_rows("hub:org/sums", subset="main", part="train"), model_folder("org/tiny")
    Hub.asked.clear()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert load_rows("hub:org/sums", subset="main", part="train") == rows and model_folder("org/tiny") == folder
    assert Hub.asked == []
    test = load_rows("hub:org/sums", "test", subset="hard")  # nobody has asked for these files
    assert [row["answer"] for row in test] == ["198"] and Hub.asked
    monkeypatch.setenv("MASTER_PORT", "29501")  # another start of the run
    Hub.asked.clear()
    assert load_rows("hub:org/sums", subset="main", part="train") == rows and Hub.asked


def test_after_an_error_the_other_ranks_of_a_node_do_not_ask_again(server, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(DataError, match="org/none could not be downloaded .*404"):
        load_rows("hub:org/none")
    Hub.asked.clear()
    with pytest.raises(DataError, match="another rank of this node could not download org/none"):
        load_rows("hub:org/none")
    assert Hub.asked == []
