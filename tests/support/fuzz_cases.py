"""Command lines for `test_fuzz.py`: bad ones by verb, values by flag, configs and damaged files."""

import os
import random
from collections.abc import Iterator
from typing import Any

from documents import parser_of
from fuzzing import Case, Change

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
RUN = (
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --eval-interval 9 --eval-iters 1 "
    "--log-interval 1"
)
DATA = "--data-path corpus --split 80,10,10 --tokenizer-type HuggingFaceTokenizer --tokenizer-model corpus-tokenizer"
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 99"
TRAIN = f"train {MODEL} {RUN} --mtp-num-layers 2"
LOADED = f"{TRAIN} {DATA} --load run"
PREPROCESS = "preprocess --input text --vocab-size 270 --workers 1 --output-prefix new"
GENERATE = "generate --load run --prompt the --max-new-tokens 3"
EVALUATE = "evaluate --load run --data-path corpus --eval-iters 1"
IMPORT, EXPORT = "convert hf-to-mcore hf new", "convert mcore-to-hf run new"

ASSETS = (
    Case(
        "preprocess --input text --output-prefix corpus --vocab-size 270 --workers 1",
        False,
        (
            ("write", "text/a.txt", "the quick brown fox jumps over the lazy dog. " * 40),
            *(("write", f"text/{n}.txt", f"{n} pack my box with five dozen jugs. " * 20) for n in range(20)),
            ("write", "small/a.txt", "other words of a small text " * 30),
            ("write", "latin.txt", "caf\xe9"),
            (
                "write",
                "chat.jsonl",
                '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},'
                ' {"role": "assistant", "content": "b"}]}\n' * 9,
            ),
            ("link", "dangling", "nowhere"),
            ("folder", "empty"),
        ),
        keeps=True,
    ),
    Case("preprocess --input small --output-prefix small-corpus --vocab-size 260 --workers 1", False, keeps=True),
    Case(f"{TRAIN} {DATA} --save run --save-interval 1 --mtp-metrics-dir run", False, keeps=True),
    Case(f"{TRAIN} {DATA} --save plain --save-interval 2".replace("--mtp-num-layers 2", ""), False, keeps=True),
    Case("convert mcore-to-hf run hf", False, keeps=True),
    Case("generate --load run --prompt the --max-new-tokens 4 --record run", False, keeps=True),
)
"""Cases that succeed and create what others start from: a corpus, checkpoints, a Hugging Face folder, a record."""


def lines(start: str, table: str, bad: bool | None = True) -> Iterator[Case]:
    """Yield one case per line: `FLAGS`, or `FLAGS -> WORDS` that the error must contain; `! ` marks one that once
    failed.
    """
    for line in filter(None, map(str.strip, table.splitlines())):
        flags, _, said = line.removeprefix("! ").partition(" -> ")
        yield Case(f"{start} {flags}", bad, said=said, failed=line.startswith("! "))


BAD_TRAIN = """
! --seq-length 0 -> --seq-length
! --seq-length -5 -> --seq-length
! --seq-length 3 --mtp-num-layers 3 -> --mtp-num-layers
! --seq-length 2 --mtp-num-layers 4 -> --mtp-num-layers
! --seq-length 32 -> --max-position-embeddings
! --max-position-embeddings 0
! --lr nan -> --lr
! --lr inf -> --lr
! --lr -1 -> --lr
--lr -inf -> --lr
--lr abc -> --lr
! --min-lr 1 -> --min-lr
! --min-lr nan -> --min-lr
! --min-lr -1
! --train-iters 0 -> --train-iters
! --train-iters -3 -> --train-iters
! --train-samples 0
! --train-samples -5
! --hidden-size 33 -> --hidden-size
! --hidden-size 0 -> --kv-channels is 0
! --hidden-size -32
! --num-attention-heads 0
! --num-attention-heads -4
! --num-attention-heads 5
! --num-layers 0
--num-layers -1
! --ffn-hidden-size 0
! --ffn-hidden-size -8
! --kv-channels 0
! --kv-channels 3
! --group-query-attention --num-query-groups 3
! --group-query-attention --num-query-groups 0
! --group-query-attention --num-query-groups -1
! --group-query-attention --num-query-groups 8
! --micro-batch-size 0 -> --micro-batch-size
! --micro-batch-size -1 -> --micro-batch-size
! --global-batch-size 0 -> --global-batch-size
! --global-batch-size -2 -> --global-batch-size
! --micro-batch-size 2 --global-batch-size 3 -> --eval-global-batch-size is 3
! --bf16 --fp16
! --tensor-model-parallel-size 2
! --tensor-model-parallel-size 0
! --tensor-model-parallel-size -1
! --pipeline-model-parallel-size 2
! --pipeline-model-parallel-size 0
! --context-parallel-size 2
! --context-parallel-size 0
! --expert-model-parallel-size 2
! --split junk -> --split
! --split '' -> --split
! --split 0,0,0 -> --split
! --split nan -> --split
--split -1,2,3 -> --split
! --split 1,2,3,4 -> --split
! --split 80;10;10 -> --split
! --eval-interval 0 -> --eval-interval
! --eval-interval -1 -> --eval-interval
! --log-interval 0 -> --log-interval
! --log-interval -1 -> --log-interval
! --eval-iters -1 -> --eval-iters
! --save s --save-interval 0 -> --save-interval
! --save s --save-interval -2 -> --save-interval
! --num-experts 4 --moe-grouped-gemm
! --num-experts 0
! --num-experts 4 --moe-router-topk 5
! --num-experts 4 --moe-router-topk 0
! --rope-type yarn
! --recompute-modules layernorm --recompute-granularity selective
! --recompute-modules nonsense --recompute-granularity selective
! --recompute-granularity full --recompute-method uniform --recompute-num-layers 0
! --checkpoint-activations
! --rotary-base 0
! --rotary-base -1
! --rotary-percent 0
! --rotary-percent 2
! --rotary-percent nan
! --use-rope-scaling --rope-scaling-factor 0
! --use-rope-scaling --rope-scaling-factor nan
! --norm-epsilon nan
! --norm-epsilon -1
! --hidden-dropout 2
! --hidden-dropout nan
! --attention-dropout -1
! --init-method-std -1
! --init-method-std nan
! --weight-decay nan
! --weight-decay -1
! --clip-grad nan
! --adam-beta1 2
! --adam-beta2 nan
! --adam-eps -1
! --adam-eps nan
! --lr-warmup-fraction 2
! --lr-warmup-fraction nan
! --lr-warmup-iters -1
! --lr-warmup-iters 5
! --lr-warmup-iters 1 --lr-warmup-fraction 0.1
! --lr-decay-iters 0
! --lr-decay-iters -5
--optimizer nonsense
! --seed -1
! --seed 0
! --seed 1000000000000000000000
! --mtp-num-layers 1000
--mtp-num-layers abc
--mtp-architecture x
--mtp-unroll 3
--mtp-loss mix
--mtp-loss lk:0.7,kd:0.2 -> add up to 1
--mtp-loss-mix 1,1,1
--mtp-lk-eta x
--mtp-loss-weights 0,0
--mtp-loss-schedule-steps 5
--mtp-draft-vocab-size 0
--mtp-draft-vocab-file empty
! --mtp-init random
! --mtp-init last-layer
! --mtp-metrics-dir dangling/x
! --save text/a.txt --save-interval 1
! --save dangling --save-interval 1
! --save /proc/nowhere --save-interval 1
--save s
! --tokenizer-type HuggingFaceTokenizer
--tokenizer-type HuggingFaceTokenizer --tokenizer-model text/a.txt
! --vocab-size 0
! --vocab-size -1
! --vocab-size 1000000000000 -> not enough memory
! --make-vocab-size-divisible-by 0
! --make-vocab-size-divisible-by -1
! --no-such-flag
--hidden-size nan
! --sft
! --yaml-cfg nowhere.yaml
! --yaml-cfg text/a.txt
! --exit-interval 0
! --exit-interval -1
! --exit-duration-in-mins -1
! --multi-latent-attention --kv-lora-rank 0
--ckpt-format nonsense
! --attention-backend nonsense
--softmax-type nonsense
! --pipeline-model-parallel-layout junk
! --tensorboard-dir text/a.txt
--position-embedding-type relative
! --use-megatron-fsdp
! --cuda-graph-impl local
! --tp-comm-overlap
! --qk-clip
! --squared-relu
! --fp16 --initial-loss-scale 0
! --fp16 --loss-scale -1
! --fp16 --loss-scale-window 0
--logits-load-dir x
! --dataloader-type external
! --data-path corpus
"""

EITHER_TRAIN = """
--apply-layernorm-1p
--rampup-batch-size 0 0 0
! --hidden-size 4
--lr 0
! --lr 1e30
! --weight-decay 1e400
--clip-grad -1
! --adam-eps 0
--lr-warmup-iters 1
! --train-samples 4
--fp16
--num-experts 4 --moe-router-topk 2
! --init-method-std 1e30
--multi-latent-attention
--use-distributed-optimizer --bf16
! --full-validation
! --multiple-validation-sets
--mtp-acceptance-interval 1
--mtp-loss lk --mtp-lk-eta 0
--mtp-use-repeated-layer --mtp-unroll 3 --mtp-repeated-layer-shares-kv
--mtp-detach-heads
--check-for-spiky-loss
--manual-gc --manual-gc-interval 0
--optimizer sgd
"""

BAD_DATA = """
--data-path nowhere -> there is no dataset
--data-path text
--data-path 0.5 corpus 0.5
! --data-path -1 corpus
! --data-path 0 corpus
! --data-path nan corpus
! --data-path 1e400 corpus
! --train-data-path corpus
! --train-data-path nowhere --valid-data-path corpus --test-data-path corpus
! --data-args-path nowhere
! --per-split-data-args-path nowhere
! --per-split-data-args-path text/a.txt
--split 1,98,1000000
! --split 100,0,0,0,0
! --seq-length 16 --data-cache-path text/a.txt
! --fim-data -> this script does not build such data sets
! --mtp-mask-prompts -> corpus.answers.npy' is not there
--sft --data-path chat.jsonl --tokenizer-type SFTTokenizer -> give --chat
! --load nowhere --mtp-init random
! --seq-length 100000 --max-position-embeddings 16
"""

BAD_LOAD = """
! --num-layers 3
! --hidden-size 64
--mtp-num-layers 1
! --num-attention-heads 2 --kv-channels 4
! --load text/a.txt
! --load empty
! --load dangling
! --load hf
! --ckpt-step 77
! --ckpt-step -1
! --lr 5e-4
! --train-iters 9 --lr-decay-style cosine
! --use-distributed-optimizer
! --normalization LayerNorm
! --optimizer sgd
! --pretrained-checkpoint nowhere --load other
"""

BAD_PREPROCESS = """
--input nowhere
! --input dangling
--vocab-size -1
! --vocab-size 1000000000000
--workers 0
--max-mb -1
--max-mb nan -> --max-mb
! --max-mb inf
! --max-mb 1e400
! --max-mb 1e308
--tokenizer text/a.txt --tokenizer-output x
! --output-prefix ''
! --output-prefix text/a.txt/x
! --output-prefix /proc/nowhere/x
! --tokenizer-output text/a.txt
--include '*.nothing'
"""

BAD_ENCODE = """
--tokenizer nowhere
--tokenizer ''
"""

BAD_GENERATE = """
--load nowhere
--load hf
--max-new-tokens abc
--temperature inf
--top-k abc
--top-p -1
--batch-size 0
--prompt ''
--prompt-ids 5,6,1000000
--prompt-file empty
--prompt-file /dev/null
--tokenizer text/a.txt
! --tokenizer small-corpus-tokenizer -> --tokenizer
--speculative-config ''
--speculative-config '{}'
--speculative-config '{"method": null}'
--speculative-config '{"method": "mtp", "no": 1}'
--speculative-config '{"method": "mtp", "num_speculative_tokens": null, "verifier": 3}'
--speculative-config '{"method": "mtp", "num_speculative_tokens": 1000000000000}'
--speculative-config '{"method": "draft_model"}'
--speculative-config '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 0}'
--load run --no-such-flag
"""

BAD_EVALUATE = """
! --eval-iters 0 -> --eval-iters
! --eval-iters -1 -> --eval-iters
--eval-iters abc
! --text small -> --data-path
--load hf
--data-path dangling
! --micro-batch-size 0
! --global-batch-size 0
! --split 1,0,0
! --split junk
! --eval-interval 0
! --train-iters 0
! --seq-length 0
--no-such-flag
! --tensor-model-parallel-size 2
"""

BAD_TEXT = """
--text nowhere
! --text dangling
! --text small --eval-iters 0
--text
! --eval-iters 1
"""

BAD_CONVERT = """
hf-to-mcore
hf-to-mcore text new
hf-to-mcore hf hf
hf-to-mcore hf /proc/nowhere
hf-to-mcore hf new --dtype float8
mcore-to-hf nowhere new
mcore-to-hf dangling new
mcore-to-hf run new --max-shard-size 0
mcore-to-hf run new --max-shard-size 1e400
mcore-to-hf run new --like nowhere
! mcore-to-hf run new --family ''
mcore-to-hf run new --tokenizer nowhere
inspect
! inspect nowhere
inspect dangling
verify hf nowhere
verify hf text/a.txt
verify hf run --text dangling
attach-mtp plain new --mtp-num-layers -1
attach-mtp plain new --mtp-num-layers 1 --mtp-init fitted
attach-mtp plain new --mtp-num-layers 1 --mtp-init fitted --data-path corpus --split 0,1,0 -> leaves none for training
attach-mtp plain new --mtp-num-layers 1 --mtp-init fitted --data-path corpus --split nan,1,0
attach-mtp plain new --mtp-num-layers 1 --seed abc
attach-mtp run new --mtp-num-layers 1
attach-mtp text/a.txt new --mtp-num-layers 1
drop-mtp run new --keep -1
drop-mtp nowhere new
drop-mtp run text/a.txt
draft-vocab run new --mtp-draft-vocab-size abc --data-path corpus
draft-vocab plain new --mtp-draft-vocab-size 4 --data-path corpus
gpt-to-hybrid nowhere new
hybrid-to-gpt run new -> is already a GPT
verify run plain -> are GPT checkpoints
nonsense
"""

BAD_REPORT = """
nowhere
dangling
run --output nowhere/x.html
"""

BAD_OTHERS = """
doctor --no-such-flag
--no-such-flag
"""

GOOD = """
doctor
doctor --json
doctor --probe
doctor --help
train --help
generate --help
convert --help
convert hf-to-mcore --help
preprocess --help
evaluate --help
report --help
--help
--version
report run
report run --output new.html
convert inspect hf
convert inspect run
convert verify hf run
convert hf-to-mcore hf new
convert mcore-to-hf run new
convert drop-mtp run new
convert drop-mtp run new --keep 1
convert attach-mtp plain new --mtp-num-layers 1
convert attach-mtp plain new --mtp-num-layers 1 --mtp-init fitted --data-path corpus --split 1
convert draft-vocab run new --mtp-draft-vocab-size 4 --data-path corpus
convert gpt-to-hybrid run new
convert gpt-to-hybrid plain new --dry-run
generate --load run --prompt the --max-new-tokens 3 --speculative-config '{"method": "mtp"}' --compare
generate --load run --prompt the --max-new-tokens 3 --json
evaluate --load run --data-path corpus --eval-iters 1
evaluate --load run --text text
"""

SCRIPTS = (
    Case(f"{TRAIN} {MOCK}".replace("--eval-interval 9", ""), said="--eval-interval is None"),
    Case(f"{TRAIN} {MOCK} --seq-length 0", program="pretrain_gpt.py", said="pretrain_gpt.py: error: "),
    Case(f"{TRAIN} {MOCK} --no-such-flag", program="pretrain_gpt.py", said="pretrain_gpt.py: error: "),
    Case(f"{TRAIN} {MOCK}", False, program="pretrain_gpt.py"),
    Case("generate --load nowhere --prompt x", program="generate_gpt.py", said="generate_gpt.py: error: "),
    Case(GENERATE, False, program="generate_gpt.py"),
    Case("convert inspect nowhere", program="convert.py", said="convert.py: error: "),
    Case("preprocess --input nowhere --output-prefix x", program="preprocess.py", said="preprocess.py: error: "),
)

ROW = '{"iteration": 1, "split": "training", "lm loss": %s}\n'
DIGITS = "9" * 400

BAD_ROWS = (
    "",
    "\n\n",
    "junk",
    "null\n",
    "3\n",
    "[]\n",
    '"x"\n',
    "{}\n",
    "{",
    "\xff\xfe",
    "[" * 5000,
    '{"iteration": "1", "split": "training", "lm loss": 1.0}\n',
    '{"iteration": null, "split": "training", "lm loss": 1.0}\n',
    '{"iteration": 1.5, "split": "training", "lm loss": 1.0}\n',
    '{"iteration": true, "split": "training", "lm loss": 1.0}\n',
    '{"iteration": 1, "split": 3, "lm loss": 1.0}\n',
    '{"iteration": 1, "split": "nonsense", "lm loss": 1.0}\n',
    '{"iteration": 1, "lm loss": 1.0}\n',
    '{"split": "training", "lm loss": 1.0}\n',
    f'{{"iteration": {DIGITS}, "split": "training", "lm loss": 1.0}}\n',
    ROW % '"x"',
    ROW % "null",
    ROW % "[]",
    ROW % "{}",
    ROW % "true",
    ROW % DIGITS,
    ROW % f"-{DIGITS}",
    ROW % ("9" * 5000),
    ROW % "1.0" + ROW % DIGITS,
    ROW % "1.0" + "junk\n" + ROW % "2.0",
)
ODD_ROWS = (ROW % "NaN", ROW % "Infinity", ROW % "1e400", ROW % "1e308", ROW % "-1e308" + ROW % "1e308", ROW % "0")

DRAFTS = '{"config": null, "figures": {}, "pieces": {}, "texts": %s}'
BAD_DRAFTS = (
    "",
    "junk",
    "null",
    "3",
    "[]",
    "{}",
    "[" * 5000,
    "\xff",
    '{"config": 3, "figures": {}, "pieces": {}, "texts": []}',
    '{"config": null, "figures": [], "pieces": {}, "texts": []}',
    '{"config": null, "figures": {}, "pieces": 3, "texts": []}',
    '{"config": null, "figures": {}, "pieces": {"1": 3}, "texts": [{"prompt": [1], "steps": []}]}',
    DRAFTS % "3",
    DRAFTS % "[3]",
    DRAFTS % '[{"prompt": ["x"], "steps": []}]',
    DRAFTS % f'[{{"prompt": [{DIGITS}], "steps": []}}]',
    DRAFTS % f'[{{"prompt": [{"9" * 5000}], "steps": []}}]',
    DRAFTS % '[{"prompt": [1], "steps": [{}]}]',
    DRAFTS % '[{"prompt": [1], "steps": [{"emitted": [1], "drafted": [2], "parents": [5], "accepted": 0}]}]',
    DRAFTS % '[{"prompt": [1], "steps": [{"emitted": [1], "drafted": [2], "parents": [-1], "accepted": 0}]}]',
    DRAFTS % '[{"prompt": [1], "steps": [{"emitted": [1], "drafted": [2], "parents": [0], "accepted": 9}]}]',
    DRAFTS % '[{"prompt": [1], "steps": [{"emitted": [1], "drafted": [2], "parents": [0], "accepted": -1}]}]',
    DRAFTS % '[{"prompt": [1], "steps": [{"emitted": [1], "drafted": [2], "parents": [0], "accepted": "x"}]}]',
    DRAFTS % '[{"prompt": [1], "steps": [{"emitted": [1], "drafted": [2], "parents": [0], "accepted": 0.5}]}]',
)

READERS = {
    "run/metrics.jsonl": ("report run",),
    "run/drafts.json": ("report run",),
    "corpus.idx": (f"{TRAIN} {DATA}", EVALUATE),
    "corpus.bin": (f"{TRAIN} {DATA}", EVALUATE),
    "corpus-tokenizer/tokenizer.json": (
        f"{TRAIN} {DATA}",
        GENERATE,
        "preprocess --input text --workers 1 --output-prefix new --tokenizer corpus-tokenizer",
    ),
    "corpus-tokenizer/tokenizer_config.json": (
        f"{TRAIN} {DATA}",
        GENERATE,
        "preprocess --input text --workers 1 --output-prefix new --tokenizer corpus-tokenizer",
    ),
    "hf/model.safetensors": (IMPORT, "convert verify hf run"),
    "hf/config.json": (IMPORT, "convert inspect hf", "convert verify hf run"),
    "run/iter_0000002/metadata.json": (GENERATE, EXPORT, LOADED),
    "run/iter_0000002/.metadata": (GENERATE, EXPORT, LOADED, "convert inspect run"),
    "run/latest_checkpointed_iteration.txt": (GENERATE, EXPORT, LOADED),
}
"""Commands that read each file."""

DAMAGES: tuple[tuple[Change, ...], ...] = (
    (("cut", 0),),
    (("cut", 9),),
    (("write", "junk"),),
    (("write", "\xff\xfe\x00"),),
    (("remove",), ("folder",)),
    (("remove",), ("link", "nowhere")),
)


def damaged() -> Iterator[Case]:
    """Yield cases with files that are truncated, overwritten, bit-flipped, or replaced by a folder or a link."""
    for text in BAD_ROWS:
        failed = "9" * 400 in text or text.startswith("[[")
        yield Case("report run", True, (("write", "run/metrics.jsonl", text),), failed=failed)
    yield from (Case("report run", False, (("write", "run/metrics.jsonl", text),)) for text in ODD_ROWS)
    for text in BAD_DRAFTS:
        failed = "9" * 400 in text or text.startswith("[[") or "0.5" in text
        yield Case("report run", True, (("write", "run/drafts.json", text),), failed=failed)
    chance = random.Random(1)
    for file, readers in READERS.items():
        for reader in readers:
            flips = [tuple(chance.randrange(10**6) for _ in range(count)) for count in (1, 1, 3)]
            for damage in (*DAMAGES, *((("flip", *places),) for places in flips)):
                changes = tuple((name, file, *rest) for name, *rest in damage)
                yield Case(reader, None, changes, statuses=(1,) if "verify" in reader or "inspect" in reader else ())


CONFIG_KEYS = (
    "architectures model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "vocab_size max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters tie_word_embeddings "
    "hidden_act head_dim num_nextn_predict_layers attention_bias torch_dtype dtype eos_token_id bos_token_id "
    "quantization_config auto_map sliding_window layer_types"
).split()
CONFIG_VALUES: tuple[Any, ...] = (None, "", "x", -1, 0, 3, 1.5, True, [], [3], {}, {"a": None}, 10**12, float("inf"))


def configs() -> Iterator[Case]:
    """Yield cases with a config.json value of another type; some of them are valid."""
    for key in CONFIG_KEYS:
        for value in CONFIG_VALUES:
            failed = key == "model_type" and value == [3]
            yield Case(IMPORT, None, (("put", "hf/config.json", key, value),), failed=failed)


POOL = ("", "abc", "nan", "-1", "0", "1e400", "1000000000000", "0x10", "1_0", "\N{SUPERSCRIPT TWO}")
NO_INTEGERS = {"", "abc", "nan", "1e400", "0x10", "\N{SUPERSCRIPT TWO}"}
STARTS = {
    "train": f"{TRAIN} {MOCK}",
    "generate": GENERATE,
    "evaluate": EVALUATE,
    "preprocess": PREPROCESS,
}


SHARE = 0.1
"""Fraction of the flag values that run, out of thousands."""


def values() -> Iterator[Case]:
    """Yield cases that give numeric flags values from the pool; FUZZ_SEED selects a different subset."""
    chance = random.Random(os.environ.get("FUZZ_SEED", "0"))
    for verb, start in STARTS.items():
        for action in parser_of(verb)._actions:
            if action.type in (int, float) and action.nargs is None:
                for value in (value for value in POOL if chance.random() < SHARE):
                    bad = True if value in NO_INTEGERS and action.type is int else None
                    yield Case(f"{start} {action.option_strings[0]} '{value}'", bad)


NO_UTF8 = "\udcff"
ODD_TEXT = (
    Case(f"generate --load run --max-new-tokens 3 --prompt 'a{NO_UTF8}b'", said="no UTF-8"),
    Case(f"report 'run{NO_UTF8}'"),
    Case(f"convert inspect 'hf{NO_UTF8}'"),
    Case(f"preprocess --input 'text{NO_UTF8}' --output-prefix new"),
    Case(f"{TRAIN} {MOCK} --tokenizer-model 'x{NO_UTF8}' --tokenizer-type HuggingFaceTokenizer"),
    Case(f"generate --load 'run{NO_UTF8}' --prompt x"),
    Case(
        "generate --load run --prompt-file odd.jsonl --max-new-tokens 3",
        True,
        (("write", "odd.jsonl", '{"prompt": "a\\ud800b"}\n'),),
        said="no UTF-8",
    ),
    Case(f"report run --output 'page{NO_UTF8}.html'", False),
    Case(f"trian{NO_UTF8}"),
)


def every_case() -> list[Case]:
    """Return all cases."""
    tables = {
        f"{TRAIN} {MOCK}": BAD_TRAIN,
        f"{TRAIN} {DATA}": BAD_DATA,
        LOADED: BAD_LOAD,
        PREPROCESS: BAD_PREPROCESS,
        "preprocess --input text --workers 1 --output-prefix new": BAD_ENCODE,
        GENERATE: BAD_GENERATE,
        EVALUATE: BAD_EVALUATE,
        "evaluate --load run": BAD_TEXT,
        "convert": BAD_CONVERT,
        "report": BAD_REPORT,
        "": BAD_OTHERS,
    }
    bad = [case for start, table in tables.items() for case in lines(start, table)]
    either = list(lines(f"{TRAIN} {MOCK}", EITHER_TRAIN, None))
    return [*bad, *either, *lines("", GOOD, False), *SCRIPTS, *ODD_TEXT, *damaged(), *configs(), *values()]
