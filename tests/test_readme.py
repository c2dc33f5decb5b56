"""The README's Python examples run as they stand, one after the other."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run():
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) >= 2
    names = {}
    for example in examples:
        exec(example, names)
    assert names["out"].shape == (40, 32, 128)
    names["cache"].check()
