"""What the README shows in Python runs as it stands there, but for the paths."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from models.draft import HOT_VOCAB, from_layers
from tests.commands import ROOT
from tests.tiny import tiny_model, tiny_tokenizer

PATHS = {"path/of/target": "target", "outputs/main/draft/model": "draft"}

# what the snippet leaves behind, for the test
AND_THEN = """
import json

rates = f"{counts.acceptance_rate} {counts.acceptance_length}"
told = {
    "said": f"{tokenizer.decode(tokens)} {rates}",
    "num_tokens": len(tokens) if counts.num_tokens == len(tokens) else -1,
    "num_drafted": counts.num_drafted,
    "ended": tokens[-1] == tokenizer.eos_token_id,
}
print(json.dumps(told))
"""


def snippets() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_snippet_decodes(tmp_path: Path) -> None:
    (snippet,) = snippets()
    target = tiny_model(num_layers=4, max_position_embeddings=1024)
    target.save_pretrained(tmp_path / "target")
    from_layers(target, [0, 1]).save_pretrained(tmp_path / "draft")
    tiny_tokenizer().save_pretrained(tmp_path / "draft")
    (tmp_path / "draft" / HOT_VOCAB).write_text('{"ids": [2, 5, 7, 11, 40, 41], "vocab_size": 300}')
    for path, folder in PATHS.items():
        assert f'"{path}"' in snippet
        snippet = snippet.replace(f'"{path}"', repr(str(tmp_path / folder)))
    script = tmp_path / "snippet.py"
    script.write_text(snippet + AND_THEN, encoding="utf-8")
    # compiling takes a minute for what other tests hold the decoder to
    quick = {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **quick}
    ended = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()[-4000:]
    # as bytes: the text of such a model has characters that a reader of lines would change
    said, told = ended.stdout.decode().rstrip("\n").rsplit("\n", 1)
    found = json.loads(told)
    assert 1 <= found["num_tokens"] <= 128
    assert found["num_tokens"] == 128 or found["ended"]
    assert found["num_drafted"] > 0
    assert said == found["said"]
