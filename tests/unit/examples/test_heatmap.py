"""The page that shows what a refiner changed."""

import json

import pytest

from examples.dynamic.heatmap import render
from examples.figures import main

SHARED = {"prompt": "Is <b> & 'c' fine?", "problem": 4}
PAIR = [
    SHARED | {"kind": "to be refined", "reward": -0.3, "tokens": ["n", "o"], "values": {"cross_entropy": [0.0, 2.5]}},
    SHARED | {"kind": "refined", "reward": 1.0, "tokens": ["<scr", "ipt>"], "values": {"cross_entropy": [0.1, 9.0]}},
]


def test_a_page_of_tokens_by_how_unlikely_they_were():
    page = render("my <run>", [{"step": 3, "samples": [{"kind": "sampled"}, *PAIR]}])
    assert "Step 3, problem 4" in page and "my &lt;run&gt;" in page
    assert "Is &lt;b&gt; &amp; &#39;c&#39; fine?" in page and "&lt;scr" in page and "<script" not in page
    assert 'rgba(213,94,0,0.50)" title="2.50 nats">o<' in page and 'rgba(213,94,0,1.00)" title="9.00 nats"' in page
    assert "reward -0.3" in page and "http" not in page and "src=" not in page


def test_the_page_of_a_run(tmp_path, capsys):
    out = tmp_path / "page.html"
    with pytest.raises(SystemExit):
        main(["heatmap", str(tmp_path), "--out", str(out)])
    assert "samples.jsonl has no refinements" in capsys.readouterr().err
    torn = json.dumps({"step": 1, "samples": PAIR}) + "\n" + '{"step": 2, "samp'
    (tmp_path / "samples.jsonl").write_text(torn)
    main(["heatmap", str(tmp_path), "--out", str(out)])
    assert "Step 1" in out.read_text()
