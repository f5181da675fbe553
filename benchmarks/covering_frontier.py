"""The frontier of pass@1 and pass@k: every decoder's own knob swept, alone and coupled in groups of eight.

    python benchmarks/covering_frontier.py --model M --data FOLDER --out FOLDER [--task NAME ...] [--work FOLDER]

The folder of data holds gsm8k_test.jsonl, math500.json and HumanEval.jsonl.gz. The model is loaded once. Whole records
are kept in the folder of --work, where a stopped run goes on; in --out they are packed without their texts, programs as
digests, every half minute and in the end. Programs of the model are run.
"""

import argparse
import gzip
import hashlib
import json
import tempfile
import threading
from pathlib import Path

from simplexity.evaluation.commands import said
from simplexity.evaluation.plan import RunPlan
from simplexity.evaluation.run import Progress, evaluate
from simplexity.evaluation.tasks import task
from simplexity.evaluation.writer import TransformersWriter
from simplexity.files import whole_file

TASKS = {  # file, questions, new tokens
    "gsm8k": ("gsm8k_test.jsonl", 150, 320),
    "humaneval": ("HumanEval.jsonl.gz", None, 512),
    "math500": ("math500.json", 100, 768),
}
SWEPT = {
    "softmax": (0.2, 0.35, 0.5, 0.65, 0.8, 1.0),
    "top-p:p=0.9": (0.4, 0.6, 0.8, 1.0, 1.3),
    "min-p:p=0.1": (0.4, 0.6, 0.8, 1.0, 1.3),
    "bok": (0.5, 1.0, 2.5),  # at most as hot as softmax at 0.24
    "bok:beta=1,lam=2,solver=exact": (0.4, 0.6, 0.8, 1.1, 1.6),
}
TREES = [f"tree-bok:beta={beta},alone={alone}" for beta in (1, 5) for alone in (0.3, 0.5, 0.7, 0.9)]
TREES += [f"tree-bok:beta=0,alone={alone},together=1" for alone in (0.2, 0.4, 0.6, 0.8)]
DECODERS = [
    f"{spec}{',' if ':' in spec else ':'}temperature={t}" for spec, temperatures in SWEPT.items() for t in temperatures
]
SECONDS = 30  # between two times of packing


def pack(folder: Path, out: Path, digests: bool) -> None:
    """The records of a run without their texts."""
    lines = []
    for line in (folder / "records.jsonl").read_bytes().split(b"\n")[:-1]:  # the last may be half written
        found = json.loads(line) | {"text": ""}
        if digests and found["answer"] is not None:
            found["answer"] = hashlib.sha256(found["answer"].encode()).hexdigest()[:10]
        found["reason"] = found["reason"][:40]
        lines.append(json.dumps(found) + "\n")
    out.mkdir(parents=True, exist_ok=True)
    with whole_file(out / "records.jsonl.gz") as draft:
        draft.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    (out / "plan.json").write_bytes((folder / "plan.json").read_bytes())


def main() -> None:
    """Task after task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", action="append", choices=list(TASKS), dest="tasks")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--limit", type=int, help="fewer questions, to try it")
    parser.add_argument("--max-tokens", type=int, help="shorter texts, likewise")
    parser.add_argument("--decoder", action="append", dest="decoders", help="only these, likewise")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    work = given.work or Path(tempfile.mkdtemp())
    decoders = tuple(given.decoders or [*DECODERS, *TREES])
    writer: TransformersWriter | None = None
    for name in given.tasks or TASKS:
        file, limit, tokens = TASKS[name]
        chosen = task(name)
        chosen.allow_code_execution = True
        asked = given.limit or limit
        count = len(chosen.load(given.data / file, asked))
        tokens = given.max_tokens or tokens
        plan = RunPlan(
            given.model, name, decoders, n=8, limit=asked, data=str(given.data / file), batch=8 * count,
            max_new_tokens=tokens, dtype=given.dtype, controls=False, every=-(-tokens // 4), coupled=(1, 8),
        )  # fmt: skip
        writer = writer or TransformersWriter(plan, chosen.system)
        writer.plan, writer.system = plan, chosen.system
        done, folder = threading.Event(), work / name

        def keep(folder: Path = folder, name: str = name, done: threading.Event = done) -> None:
            while not done.wait(SECONDS):
                if (folder / "records.jsonl").exists():
                    pack(folder, given.out / name, digests=name == "humaneval")

        packing = threading.Thread(target=keep)
        packing.start()
        try:
            told = Progress(finished=lambda spec, rows: print(f"  {spec}", flush=True))
            times = evaluate(plan, chosen, folder, lambda own=writer: own, told)
        finally:
            done.set()
            packing.join()
        pack(folder, given.out / name, digests=name == "humaneval")
        print(f"{name}: {said(times)}", flush=True)


if __name__ == "__main__":
    main()
