"""Runs of an evaluation that end after some batches, for whichever writer."""

from simplexity.evaluation.run import evaluate
from simplexity.evaluation.tasks import task


def go(plan, folder, writer, count=None, end: type[BaseException] = KeyboardInterrupt):
    """Evaluate; `count` batches are written at most, then it ends as if interrupted, or with another error."""
    writer.plan = plan

    class Stops:
        def write_all(self, works):
            for number, work in enumerate(works):
                if count is not None and number >= count:
                    raise end
                yield work, writer.write(work)

    return evaluate(plan, task("gsm8k"), folder, Stops)
