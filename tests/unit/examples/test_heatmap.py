"""The page that shows what a refiner changed."""

import json

import pytest

from examples.dynamic.heatmap import render
from examples.figures import main

EXAMPLE = {
    "problem": 4,
    "prompt": "Is <b> & 'c' fine?",
    "response": "no",
    "refined": "<script>",
    "reward": -0.3,
    "refined_reward": 1.0,
    "response_tokens": ["n", "o"],
    "response_cross_entropy": [0.0, 2.5],
    "refined_tokens": ["<scr", "ipt>"],
    "refined_cross_entropy": [0.1, 9.0],
}


def test_a_page_of_tokens_by_how_unlikely_they_were():
    page = render("my <run>", [{"step": 3, "examples": [EXAMPLE]}])
    assert "Step 3, problem 4" in page and "my &lt;run&gt;" in page
    assert "Is &lt;b&gt; &amp; &#39;c&#39; fine?" in page and "&lt;scr" in page and "<script" not in page
    assert 'rgba(213,94,0,0.50)" title="2.50 nats">o<' in page and 'rgba(213,94,0,1.00)" title="9.00 nats"' in page
    assert "reward -0.3" in page and "http" not in page and "src=" not in page


def test_the_page_of_a_run(tmp_path, capsys):
    out = tmp_path / "page.html"
    with pytest.raises(SystemExit):
        main(["heatmap", str(tmp_path), "--out", str(out)])
    assert "refinements.jsonl" in capsys.readouterr().err
    torn = json.dumps({"step": 1, "examples": [EXAMPLE]}) + "\n" + '{"step": 2, "exam'
    (tmp_path / "refinements.jsonl").write_text(torn)
    main(["heatmap", str(tmp_path), "--out", str(out)])
    assert "Step 1" in out.read_text()
