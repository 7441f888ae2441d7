"""Create everything that the pages refer to, as small as possible: Hugging Face folders with a tokenizer, and
documents.

    python document_scene.py FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

import hf_models

from megatron_mtp.data.tokenizer import train_bpe

ENTRIES, TEXTS = 384, 60
MODELS = {
    "GLM-4.5-Air": ("glm4_moe", 1),
    "my-glm": ("glm4_moe", 0),
    "Qwen3-0.6B": ("qwen3", 0),
}
"""Kind and number of MTP layers of each folder in models/."""

RUN = """
model: {num-layers: 2, hidden-size: 64, num-attention-heads: 4, seq-length: 64, max-position-embeddings: 64,
  position-embedding-type: rope, mtp-num-layers: 1}
training: {micro-batch-size: 1, global-batch-size: 64, train-iters: 2, eval-interval: 2, eval-iters: 1, lr: 1e-3}
data: {mock-data: true, tokenizer-type: NullTokenizer, vocab-size: 383}
"""

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "\n\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def main(folder: Path) -> None:
    texts = [path.read_text() for path in sorted(Path(hf_models.__file__).parent.glob("*.py"))[:TEXTS]]
    (folder / "my_texts").mkdir()
    (folder / "held_out").mkdir()
    for number, text in enumerate(texts):
        (folder / ("held_out" if number == 0 else "my_texts") / f"{number}.txt").write_text(text)
    train_bpe(texts, ENTRIES, str(folder / "tokenizer"))
    hf_models.SIZES |= {"vocab_size": ENTRIES, "max_position_embeddings": 4096}
    (folder / "run.yaml").write_text(RUN)
    for name, (kind, depths) in MODELS.items():
        made = hf_models.make(folder / "models" / name, kind, depths)
        shutil.copytree(folder / "tokenizer", made, dirs_exist_ok=True)
        (made / "chat_template.jinja").write_text(TEMPLATE)
    hub = folder / "hub" / "models--zai-org--GLM-4.5-Air"  # the cache layout of huggingface_hub
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("1a2b")
    shutil.copytree(folder / "models" / "GLM-4.5-Air", hub / "snapshots" / "1a2b")
    shutil.copytree(folder / "models" / "Qwen3-0.6B", folder / "runs" / "smollm2" / "hf")
    package = folder / ".venv" / "lib" / "python3.12" / "site-packages" / "transformers" / "models"
    for number, text in enumerate(texts):
        (package / f"m{number}").mkdir(parents=True)
        (package / f"m{number}" / f"modeling_m{number}.py").write_text(text)
    words = " ".join(texts).split()
    lines = (json.dumps({"text": " ".join(words[at : at + 40])}) for at in range(0, 48_000, 40))
    (folder / "lines.jsonl").write_text("\n".join(lines))  # enough documents for Megatron's default split
    (folder / "llama.cpp").mkdir()
    (folder / "llama.cpp" / "convert_trained.py").touch()
    chat = [{"role": "user", "content": "What is MTP?"}, {"role": "assistant", "content": "Several tokens at once."}]
    (folder / "chats.jsonl").write_text(20 * (json.dumps({"messages": chat}) + "\n"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
