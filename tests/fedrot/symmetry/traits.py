"""What each member of the zoo claims, written down from the models' code."""

from tests.families import ALIBI, FIXED, MEMBERS


def _words(*lines):
    return tuple(" ".join(lines).split())


_T5 = "t5 t5-gated t5-classifier mt5"
_LLAMA = "llama llama-factor mistral qwen2 phi3 phi3-partial mixtral"
_FALCON = "falcon-7b falcon-11b falcon-40b"
_GPT_NEOX = "gpt-neox gpt-neox-odd gpt-neox-tokens"

#: Models whose output is the residual stream.
BARE = _words("t5-encoder clip-text-bare")
#: Queries and keys pass a norm with gains before rotary positions.
NORMED = _words("qwen3 gemma3")
#: Rotary positions, and those that turn a part of each head alone.
ROTARY = _words(
    _GPT_NEOX,
    _LLAMA,
    _FALCON,
    "llama-biased modernbert modernbert-biased gptj gptj-whole",
)
PARTIAL = _words(_GPT_NEOX, "gptj phi3-partial")
#: Query heads that share key heads.
GROUPED = _words(_LLAMA, _FALCON, "qwen3 gemma3")
ONE_KEY_HEAD = _words("mistral falcon-7b")
#: Feed-forward blocks with a gate.
GATED = _words(_LLAMA, "qwen3 gemma3 llama-biased modernbert modernbert-biased")
GATED += _words("t5-gated t5-classifier mt5")
#: Streams under RMSNorm, and under LayerNorm.
RMS = _words(_LLAMA, _T5, "qwen3 gemma3 llama-biased")
LAYERNORM = tuple(name for name in MEMBERS if name not in (*RMS, *BARE, *FIXED))
#: Layers that share a bias per head.
SHARED = _words(_T5, "mpnet mpnet-mlm t5-encoder")

#: For which units of a head the bias of the key adds the same to all scores of a query.
KEY_BIAS = dict.fromkeys(
    _words(
        "bert roberta camembert electra mpnet mpnet-mlm albert albert-groups bart "
        "bart-classifier",
        "vit deit gpt2 gpt2-classifier opt opt-open opt-projected",
        "clip clip-classifier clip-text clip-image clip-text-bare",
        *ALIBI,
        *FIXED,
    ),
    "all",
)
KEY_BIAS |= dict.fromkeys(_words("gpt-neox gpt-neox-odd"), "not turned")
KEY_BIAS |= dict.fromkeys(_words("llama-biased qwen2 qwen3 modernbert-biased"), "none")
KEY_BIAS |= dict.fromkeys(
    _words("deberta-v2 deberta-v2-conv deberta-v3 deberta-v3-new"), "none"
)

#: Members whose attention has no bias, or whose key biases are seen while outputs have
#: no bias.
NO_REDUNDANT_BIAS = _words(
    _T5, _LLAMA, _FALCON, "gemma3 t5-encoder gpt-neox-tokens vit-plain"
)
NO_REDUNDANT_BIAS += _words("modernbert gptj gptj-whole")
#: Members whose value biases alone are redundant: rotary positions on all of a head,
#: and positions that attend to content while keys of positions have no bias of their
#: own.
VALUES_ONLY = _words(
    "llama-biased qwen3 modernbert-biased deberta deberta-c2p deberta-embedding"
)
VALUES_ONLY += _words("deberta-v3 deberta-v3-new")

#: Members whose streams can be rotated after their gains are folded.
TURNING_LAYERNORM = _words(
    "vit vit-plain deit clip clip-text gpt2 gpt2-classifier gptj gptj-whole"
)
TURNING_LAYERNORM += _words(_GPT_NEOX, _FALCON, "falcon-rw opt")
TURNING = (*(name for name in RMS if name != "gemma3"), *TURNING_LAYERNORM)
