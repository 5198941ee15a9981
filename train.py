"""The only training loop: swap a teacher's attention for a linear mixer, distil, judge.

    python train.py --mixer delta --size 140m                       the whole thing; downloads nothing but the teacher
    python train.py --mixer gated_delta --window 64 --data book.txt a hybrid, on text of your own
    python train.py --mixer delta --size 140m --resume              go on after a kill, to the same bits
    python train.py --mixer gla,delta --lr 3e-4,1e-3 --seed 0,1     a sweep: every combination, a table, a figure

Top to bottom: flags -> data -> the plan -> checkpoints -> the loop -> the scoreboard -> sweeps. Losses: distill.py.
A run is a folder: args.json, metrics.jsonl, heldout.safetensors, step-N/ (a model that `evaluate.py` reads, and until
the end the optimizer), scores.json, loss.png. The order of the data is a function of --seed and the step alone.
"""

import argparse
import copy
import dataclasses
import difflib
import hashlib
import itertools
import json
import math
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
import traceback
import typing
import zlib
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for 2 MB pages: a tenth less memory, fewer page faults

import numpy as np
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from tqdm import tqdm

import distill
import evaluate
import surgery
from mixers import MIXERS
from surgery import BadInput, find_checkpoint, reading

SHARD = 20_000_000  # tokens of text in a file, and in memory
TOKENS = surgery.CACHE / "tokens"
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # of torchrun's processes

# ------------------------------------------------------------------ flags


SWEPT = ("--mixer", "--size", "--teacher", "--window", "--option", "--recipe", "--tokens", "--lr", "--seed")  # lists


def parser():
    """Every flag. One that may differ when a run goes on is also named in evaluate.MACHINE."""
    lists = f"A comma list after {', '.join(SWEPT)} is a sweep over the product, a folder a run."
    p = surgery.Parser(description=f"Linearize a teacher and distil it. {lists}", allow_abbrev=False)
    add = p.add_argument_group("model").add_argument
    add("--mixer", help=f"what replaces attention: {', '.join(MIXERS)} (default delta)")
    add("--size", help=f"teacher by size: {', '.join([*surgery.SIZES, *surgery.SMALL])} (default 140m)")
    add("--teacher", help="folder, hub name, .gguf or run, instead of --size; none: pretrain from scratch")
    add("--family", default="llama", choices=["llama", "gpt2"], help="of --teacher none (default llama)")
    add("--tokenizer", help="of --teacher none: a teacher's, or bytes (default)")
    add("--window", type=int, default=0, help="softmax over the last W tokens beside it (default 0: none)")
    add("--keep", default="", help="layers left softmax: 0,8,16, or auto:K, the K that gain most (none)")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="a mixer's option, as conv=0")
    add("--student", metavar="RUN", help="go on from the student of a finished run, with another recipe or data")
    add = p.add_argument_group("data").add_argument
    add("--data", help="text, jsonl, parquet, folder, hub name[:config[:split]], or mqar:N (default: docstrings)")
    add("--context", type=int, default=512, help="tokens per sequence (default 512)")
    add("--needles", type=float, default=0.0, help="share of sequences that hide and ask RULER's needles (0)")
    add = p.add_argument_group("training").add_argument
    add("--recipe", choices=distill.RECIPES, help="stages and rates (default: default; hybrid with --window)")
    add("--tokens", type=count, help="budget over all stages, as 20k or 3b (default: ten minutes' worth)")
    add("--tokens-per-step", type=count, help="(default --context a process, as steps count most; pretraining 16 ×)")
    add("--micro-batch", type=int, help="sequences at once, for memory alone (default: all of a step)")
    add("--recompute", action="store_true", help="gradient checkpointing: less memory, a third more work")
    add("--lr", type=float, help="one learning rate for all stages (default: the recipe's)")
    add("--rates", default="", help="factors on it by role, as new=10,trunk=0.1; also mixer (default none)")
    add("--calibrate", type=int, help="sequences to calibrate on first (default 16, a hybrid 0)")
    add("--seed", type=int, default=0, help="of new weights and the order of the data (default 0)")
    add = p.add_argument_group("run").add_argument
    add("--out", help="folder of the run (default runs/MIXER-SIZE…; of a sweep runs/sweep)")
    add("--resume", action="store_true", help="go on with the run in that folder")
    add("--save-every", type=int, default=60, help="steps between checkpoints (default 60)")
    add("--dry-run", action="store_true", help="print the plan, and stop")
    add("--report", metavar="FOLDER", help="draw a sweep's table, fits and figure again, and stop")
    add = p.add_argument_group("machine").add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or mps")
    add("--precision", default="auto", choices=["auto", "bf16", "fp32"], help="of matmuls (default auto)")
    add("--shard", action="store_true", help="under torchrun: a part of the weights in each process (FSDP)")
    return p


def count(text):
    """'20k' -> 20000."""
    scale = {"k": 10**3, "m": 10**6, "b": 10**9}.get(text[-1:].lower(), 1)
    try:
        return int(float(text[:-1] if scale > 1 else text) * scale)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; write 50000, 50k, 3m or 1b") from None


RANGES = {
    "lr": (1e-9, 1),
    "tokens": (1, 10**13),
    "context": (2, 2**20),
    "needles": (0, 0.99),
    "tokens_per_step": (1, 2**30),
    "micro_batch": (1, 2**20),
    "save_every": (1, 10**9),
    "window": (0, 2**20),
    "calibrate": (0, 2**20),
    "seed": (0, 2**31),
}


def points(words):
    """The words of a command line -> one list of words a run: the product of the comma lists after flags of SWEPT."""
    choices, flag = [], ""
    for word in words:
        name, told, value = word.partition("=")
        if told and name in SWEPT:
            choices.append([f"{name}={part}" for part in parts_of(name, value)])
        else:
            choices.append(parts_of(flag, word))
        flag = word
    return [list(run) for run in itertools.product(*choices)]


def parts_of(flag, value):
    """'0,1' after --seed -> ['0', '1']; 'conv=0,4' after --option -> ['conv=0', 'conv=4']."""
    if flag not in SWEPT or Path(value).exists():
        return [value]
    stem = value[: value.find("=") + 1] if flag == "--option" else ""
    return [stem + part for part in value.removeprefix(stem).split(",")]


def read_flags(words):
    """The flags, completed and checked."""
    args = parser().parse_args(words)
    if args.student:
        take_student(args)
    scratch = args.teacher == "none"
    if args.size and args.teacher and not scratch:
        raise BadInput(f"--size {args.size} --teacher {args.teacher}: a teacher has its own size; leave one out")
    args.mixer, args.size = args.mixer or "delta", args.size or "140m"
    args.recipe = args.recipe or usual_recipe(args)
    if args.calibrate is None:
        args.calibrate = 0 if args.window or scratch or args.student else 16
    if args.tokens_per_step is None:
        args.tokens_per_step = args.context * (16 if scratch else WORLD)
    check(args, scratch)
    args.teacher = args.teacher or args.size
    return args


def check(args, scratch):
    """BadInput for flags that cannot be, alone or together; scratch: there is no teacher."""
    if args.mixer not in MIXERS:
        near = difflib.get_close_matches(args.mixer, MIXERS, 1, cutoff=0)
        raise BadInput(f"--mixer {args.mixer!r} is not known; did you mean {near[0]!r}? There are {', '.join(MIXERS)}")
    if (args.size in surgery.SMALL) != scratch and (scratch or not args.teacher):
        small = ", ".join(surgery.SMALL)
        raise BadInput(f"--size {args.size} --teacher {args.teacher}: {small}, and they alone, go with --teacher none")
    if scratch != (args.recipe in ("pretrain", "recall")):
        raise BadInput(f"--recipe {args.recipe} --teacher {args.teacher}: pretrain, recall, and they alone, have none")
    if scratch and (args.calibrate or args.keep or args.student):
        raise BadInput("--teacher none: nothing to calibrate to, keep or go on from; leave out what asks for it")
    if args.tokenizer and not scratch:
        raise BadInput(f"--tokenizer {args.tokenizer}: a teacher brings its own; leave it out")
    for name, (low, high) in RANGES.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise BadInput(f"--{name.replace('_', '-')} {value}: wanted a number from {low} to {high}")
    if args.calibrate == 1:
        raise BadInput("--calibrate 1: wanted 0, or at least 2 (one window chooses among the fits to the others)")
    if args.window > args.context:
        raise BadInput(f"--window {args.window}: wanted at most --context {args.context}, else it would never slide")
    if args.shard and WORLD == 1:
        raise BadInput("--shard: one process has nothing to share; start it by torchrun --nproc_per_node=2 train.py …")
    with reading(f"--device {args.device}", "try --device cpu"):
        if torch.device(args.device).type not in ("cpu", "cuda", "mps"):
            raise ValueError("not cpu, cuda or mps")
        torch.empty(0, device=args.device)


def name_of(args):
    """The folder of a run, if not told."""
    if args.student:
        return f"{Path(args.student).name}-{args.recipe}"
    teacher = args.size if args.teacher == "none" else Path(args.teacher).name.removesuffix(".gguf").lower()
    recipe = "" if args.recipe == usual_recipe(args) else f"-{args.recipe}"
    return f"{args.mixer}-{teacher}{f'-w{args.window}' if args.window else ''}-s{args.seed}{recipe}"


def usual_recipe(args):
    """The recipe, if not told."""
    if args.teacher == "none":
        return "recall" if args.size == "mqar" else "pretrain"
    return "hybrid" if args.window else "default"


def take_student(args):
    """What --student says of its mixers and its teacher goes into the flags, which may not say otherwise."""
    if not (Path(args.student) / "args.json").exists():
        raise BadInput(f"--student {args.student}: no run there; give the folder of one, with its args.json")
    told, usual = surgery.read_json(Path(args.student) / "args.json"), parser().parse_args([])
    for name in ("mixer", "window", "keep", "option"):
        if getattr(args, name) != getattr(usual, name):
            raise BadInput(f"--student {args.student}: its own stays; leave --{name} out")
        setattr(args, name, told.get(name, getattr(usual, name)))
    if told.get("teacher") == "none":
        raise BadInput(f"--student {args.student}: it was pretrained, not distilled; give it as --teacher")
    args.teacher, args.recipe = args.teacher or told.get("teacher"), args.recipe or "default"


def options_of(args):
    """-> (layers of --keep, how many --keep auto:K is to choose, --option as {name: value})."""
    auto, listed = args.keep.startswith("auto:"), args.keep.removeprefix("auto:")
    try:
        numbers = [int(i) for i in listed.split(",") if i]
        options = {name: value_of(text) for name, text in (pair.split("=", 1) for pair in args.option)}
        if auto and (len(numbers) != 1 or numbers[0] < 1):
            raise ValueError
    except ValueError:
        told = f"--keep {args.keep!r}, --option {args.option}"
        raise BadInput(f"{told}: wanted 0,8,16 or auto:4, and NAME=VALUE") from None
    for name in options.keys() & {"teacher", "mixer", "window", "keep"}:
        raise BadInput(f"--option {name}={options[name]}: this has a flag of its own, --{name}")
    return ([], numbers[0], options) if auto else (numbers, 0, options)


def value_of(text):
    """'true' -> True, '4' -> 4, and other text as it is."""
    return {"true": True, "false": False}.get(text.lower(), int(text) if text.isdecimal() else text)


def rates_of(args):
    """--rates as Stage has it."""
    try:
        rates = {name: float(text) for name, text in (pair.split("=") for pair in args.rates.split(",") if pair)}
        if rates.keys() - {"trunk", "mixer", "new"} or not all(0 <= r < math.inf for r in rates.values()):
            raise ValueError
    except ValueError:
        raise BadInput(f"--rates {args.rates!r}: wanted factors of trunk, mixer or new, as new=10,trunk=0.1") from None
    return rates


# ------------------------------------------------------------------ data


def ids_of(document, tokenizer, source):
    """A text, with the end of text after it, or a chat -> ids; what an assistant did not say in a chat stands as ~id.

    A chat is [{"role": …, "content": …}, …] and goes through the teacher's template.
    """
    if isinstance(document, str) and "\0" not in document:
        return tokenizer.encode(document) + [tokenizer.eos]
    chat = isinstance(document, list) and all(
        isinstance(m, dict) and isinstance(m.get("content"), str) for m in document
    )
    if not chat:
        raise BadInput(f"--data {source}: {document!r:.40} is no text and no chat; give rows with 'text' or 'messages'")
    ids, said = [], ""
    for i, message in enumerate(document):
        if message.get("role") == "assistant":
            before = surgery.dialogue(tokenizer, document[:i])
            after = surgery.dialogue(tokenizer, document[: i + 1], reply=False)
            if not (before.startswith(said) and after.startswith(before)):
                raise BadInput(f"--data {source}: the chat template changes earlier turns, so answers cannot be marked")
            ids += [~t for t in tokenizer.encode(before[len(said) :], special=True)]
            ids += tokenizer.encode(after[len(before) :], special=True)
            said = after
    return ids


def with_needles(args, tokenizer):
    """Yield windows of --context tokens: of --data's documents, and for --needles of them, needles hidden in those."""
    draw, kept, n = random.Random(0), [], args.context
    for document in evaluate.documents(args.data):
        ids = kept + ids_of(document, tokenizer, args.data)
        kept = ids[len(ids) // n * n :]
        for window in (ids[at : at + n] for at in range(0, len(ids) - n + 1, n)):
            yield window
            while draw.random() < args.needles:
                level, keys, seed = draw.choice((1, 2, 3)), draw.choice((1, 1, 2, 4)), draw.getrandbits(32)
                new = 40 if level == 3 else 9
                text = tokenizer.decode(window) if level > 1 else ""
                (asked,) = evaluate.needles(level, n, tokenizer, text, 1, new, seed, keys)
                hidden = tokenizer.encode(f"{asked.prompt} {asked.wanted}.") + [tokenizer.eos]
                yield [tokenizer.eos] * (n - len(hidden)) + hidden[:n]


def ids_from(args, tokenizer, start=0):
    """Yield the ids of each document of --data, or of each exercise of mqar:N, from number `start` on."""
    if args.needles:
        yield from itertools.islice(with_needles(args, tokenizer), start, None)
    elif not (args.data or "").startswith("mqar:"):
        documents = itertools.islice(evaluate.documents(args.data), start, None)
        yield from (ids_of(document, tokenizer, args.data) for document in documents)
    elif not args.data[5:].isdecimal() or tokenizer.vocab < 257 + 512:
        raise BadInput(f"--data {args.data}: wanted mqar:8, eight pairs to recall, and --teacher none --size mqar")
    else:
        exercises = itertools.islice(evaluate.recall(int(args.data[5:]), args.context), start, None)
        yield from (np.where(x < 0, x - 257, x + 257) for x in exercises)


def identity(data):
    """What --data is made of: other text, other shards."""
    path = Path(data or "")
    if data and path.exists():
        files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
        return [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    return data or [platform.python_version(), torch.__version__, np.__version__]


class Text:
    """--data as tokens on disk, made once for all runs: shard k is shard-k.bin, int32 and mapped, beside shard-k.json.

    A shard is whole documents, SHARD tokens or a little more; ~id is read but not learned. It is made when it is first
    wanted, the next one meanwhile. The order of a run is one permutation a shard and epoch, which --seed decides: what
    is read at a step is known without reading what came before. Every 50th window of shard 0 is held out.
    """

    def __init__(self, args, tokenizer):
        made, given = f"{tokenizer.to_json()}{tokenizer.eos}{tokenizer.chat}", Path(args.data or "")
        self.args, self.tokenizer, self.opened, self.coming, self.ahead = args, tokenizer, {}, {}, None
        self.about = {"vocab": tokenizer.vocab, "tokenizer": hashlib.sha1(made.encode()).hexdigest()}
        self.exercises = (args.data or "").startswith("mqar:")
        parts = [self.about, identity(args.data), args.needles, args.context * (self.exercises or args.needles > 0)]
        self.given = bool(args.data and list(given.glob("shard-*.json")))
        self.folder = given if self.given else TOKENS / hashlib.sha1(json.dumps(parts).encode()).hexdigest()[:16]
        tokens, self.header = self.shard(0)
        n = len(tokens) // args.context
        if n < 2:
            few = f"{len(tokens)} tokens, but training and held-out text need a context of {args.context} each"
            raise BadInput(f"--data {args.data}: {few}; give more text or a smaller --context")
        windows = tokens[: n * args.context].view(n, args.context)
        held = torch.arange(n) % 50 == min(n, 50) - 1
        some = torch.randperm(int(held.sum()), generator=torch.Generator().manual_seed(0))
        self.first, self.held = windows[~held], windows[held][some[: max(16, 8192 // args.context)]].long()
        self.opened[0] = self.first.flatten(), self.header  # without the gaps of held-out windows
        self.checksum = f"{zlib.crc32(self.first.numpy()):08x}"  # which text this is, for --resume

    def shard(self, k):
        """-> (tokens (n,), its header), or None beyond the last; another process that is making it is waited for."""
        if k not in self.opened:
            last = k and self.opened[k - 1][1]["last"]
            self.opened[k] = None if last else self.open(k, self.folder / f"shard-{k:05d}.json")
        return self.opened[k]

    def open(self, k, file):
        """Shard k, made if need be, checked and mapped."""
        if not self.given:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / "lock"):
                if not file.exists():
                    self.make(k, file)
        header = surgery.read_json(file)
        if wrong := [name for name, value in self.about.items() if header.get(name) != value]:
            raise BadInput(f"--data {self.folder}: shards of another {wrong[0]} than this teacher's; make them again")
        binary, n = file.with_suffix(".bin"), header["tokens"]
        if not binary.exists() or binary.stat().st_size != 4 * n:
            raise BadInput(f"{binary}: not the {4 * n} bytes that {file.name} tells of; delete both")
        return torch.from_file(str(binary), size=n, dtype=torch.int32) if n else torch.zeros(0).int(), header

    def make(self, k, file):
        """Write shard k: the documents after those of the shards before it."""
        before = self.opened[k - 1][1]["documents"] if k else 0
        source = self.coming.pop(k, None) or ids_from(self.args, self.tokenizer, before)
        parts, total, size = [np.zeros(0, np.int32)], 0, 2_000_000 if self.exercises else SHARD
        while total <= size and (ids := next(source, None)) is not None:
            parts.append(np.array(ids, np.int32))
            total += len(ids)
        if not total and not k:
            given = self.args.data
            raise BadInput(f"--data {given}: no text in it, or no chat in which the assistant speaks; give some")
        self.coming[k + 1], tokens = source, np.concatenate(parts)
        header = self.about | {"documents": before + len(parts) - 1, "tokens": total, "last": total <= size}
        header["chats"] = bool((tokens < 0).any())
        for path, content in ((file.with_suffix(".bin"), tokens.tobytes()), (file, json.dumps(header).encode())):
            path.with_suffix(".tmp").write_bytes(content)
            path.with_suffix(".tmp").replace(path)

    def rows(self, first, n, seed, length=None):
        """Sequences first … first + n − 1 of a run, (n, length), --context long if not told."""
        found, at, epoch, k, length = [], 0, 0, 0, length or self.args.context
        while n:
            shard = self.shard(k)
            if shard is None:
                epoch, k = epoch + 1, 0
                continue
            windows = shard[0][: len(shard[0]) // length * length].view(-1, length)
            if first < at + len(windows):
                g = torch.Generator().manual_seed(seed * 1000 + epoch + (k << 32))
                rows = torch.randperm(len(windows), generator=g)[first - at : first - at + n]
                found.append(windows[rows].long())
                first, n = first + len(rows), n - len(rows)
                self.prepare(k + 1)
            at, k = at + len(windows), k + 1
        return torch.cat(found)

    def prepare(self, k):
        """Make shard k beside the training, if the run will come to it."""
        if self.ahead == k or self.exercises or (self.args.tokens or 0) < k * SHARD:
            return
        self.ahead = k
        threading.Thread(target=self.shard, args=(k,), daemon=True).start()


# ------------------------------------------------------------------ the plan


class Leg(typing.NamedTuple):
    """A stage on its way: steps start … stop − 1 of `sequences` × `length` tokens; row: how many came before."""

    stage: distill.Stage
    start: int
    stop: int
    sequences: int
    length: int
    row: int


def plan(args, recipe):
    """-> [Leg]: shares of --tokens in whole steps, at least one each."""
    legs, at, used = [], 0, 0
    for stage in recipe:
        length = args.context * stage.context
        sequences = max(args.tokens_per_step // length, 1)
        if args.tokens_per_step % args.context or sequences % WORLD:
            told = f"--tokens-per-step {args.tokens_per_step}: wanted a multiple of {WORLD * length}"
            raise BadInput(f"{told}, whole sequences of {length} for each process ({WORLD})")
        steps = max(round(args.tokens * stage.fraction / (sequences * length)), 1)
        legs.append(Leg(stage, at, at + steps, sequences, length, used // length))
        at, used = at + steps, used + steps * sequences * length
    return legs


def flops_per_token(model, stage):
    """Multiplications and additions of one token's step: 2 per weight forward, 4 backward, the teacher's forward."""
    head = model.config.vocab * model.config.width
    blocks = sum(p.numel() for p in model.blocks.parameters())
    mixers = sum(p.numel() for block in model.blocks for p in block.mixer.parameters())
    if stage.loss in distill.LOCAL:
        return 8 * blocks if stage.loss == "hidden" else 2 * blocks + 6 * mixers
    return (8 if stage.loss == "logits" else 6) * (blocks + head)


def matmul_rate(device, dtype):
    """FLOP/s of this machine at its best of 30 times one matmul of 140m's MLP."""
    x, w = torch.randn(1024, 576, device=device, dtype=dtype), torch.randn(1536, 576, device=device, dtype=dtype)
    best = math.inf
    for _ in range(30):
        began = time.perf_counter()
        (x @ w.T)[0, 0].item()
        best = min(best, time.perf_counter() - began)
    return 2 * 1024 * 576 * 1536 / best


def flops_per_second(device, dtype):
    """FLOP/s to expect of a training step here: a third (measured, delta at 140m) of `matmul_rate`, in each process."""
    return agreed(matmul_rate(device, dtype)) / 3 * WORLD


def saved_bytes(block, args, dtype, tokens=256):
    """Bytes that a block keeps for its backward pass per token, measured on `tokens` of noise."""
    seen, own = {}, {p.untyped_storage().data_ptr() for p in block.parameters()}
    keep = lambda x: seen.setdefault(x.untyped_storage().data_ptr(), x)
    x = torch.randn(1, tokens, block.mixer.width, device=args.device)
    with evaluate.autocast(args.device, dtype), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        block(x.requires_grad_())
    return sum(x.untyped_storage().nbytes() for at, x in seen.items() if at not in own) / tokens


def memory(student, leg, args, dtype):
    """Bytes to expect at a leg's peak: weights, the teacher's, gradients and moments, activations, the vocabulary."""
    size, config = sum(p.numel() for p in student.parameters()), student.config
    distill.set_lora(student, leg.stage.lora)
    distill.trainable(student, leg.stage.trains)
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    distill.set_lora(student, 0)
    at_once = leg.length * min(args.micro_batch or leg.sequences, leg.sequences)
    deep = 1 if leg.stage.loss in distill.LOCAL or args.recompute else config.layers
    kept = 8 * config.width * config.layers if args.recompute else 0
    activations = at_once * (kept + deep * saved_bytes(student.blocks[-1], args, dtype))
    vocabulary = 0 if leg.stage.loss in distill.LOCAL else 16 * min(at_once, 512) * config.vocab
    return (4 + dtype.itemsize) * size + 12 * trained + activations + vocabulary + 2**30


def costs(args, student, legs, dtype, rate):
    """-> [FLOPs of a leg], [GiB at most], minutes; BadInput where this machine or this model cannot have them."""
    work = [flops_per_token(student, leg.stage) * (leg.stop - leg.start) * leg.sequences * leg.length for leg in legs]
    needed = [memory(student, leg, args, dtype) / 2**30 for leg in legs]
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if torch.device(args.device).type == "cpu" and max(needed) > here:
        told = f"about {max(needed):.0f} GiB needed, {here:.0f} are here"
        raise BadInput(f"{told}; --micro-batch 1, --recompute or less --context")
    longest, places = max(leg.length for leg in legs), student.config.context
    if student.config.learned and longest > places:
        told = f"{longest} tokens, this model has learned {places} positions"
        raise BadInput(f"--recipe {args.recipe}: {told}; less --context")
    return work, needed, sum(work) / rate / 60 + 1  # one to load and to score


def announce(args, student, legs, rate, dtype):
    """Print a row a stage, then what the recipe's paper has beside it, the state, and the minutes to expect."""
    print(f"{'stage':<10}{'tokens':>12}{'steps':>8}{'sequences':>12}{'lr':>9} schedule  trains {'TFLOP':>9}{'GiB':>6}")
    works, most, minutes = costs(args, student, legs, dtype, rate)
    for leg, work, needed in zip(legs, works, most):
        stage, steps, size = leg.stage, leg.stop - leg.start, leg.sequences * leg.length
        shape = f"{leg.sequences} × {leg.length}"
        row = f"{stage.loss:<10}{steps * size:>12,}{steps:>8,}{shape:>12}{stage.lr:>9.1e} {stage.schedule:<9}"
        told = stage.unusual() + [f"{size:,} tokens a step, as sequences are whole"] * (size != args.tokens_per_step)
        print(f"{row} {stage.trains:<7}{work / 1e12:>9,.0f}{needed:>6.1f}  {', '.join(told)}".rstrip())
    here = [f"--window {args.window}", f"--context {args.context}", *(f"--option {told}" for told in args.option)]
    if lacking := [flag for flag in distill.PAPERS.get(args.recipe, ()) if flag not in here]:
        print(f"recipe {args.recipe}: its paper trains with {' '.join(lacking)}; this run does not")
    state = sum(block.mixer.state_size(args.context) for block in student.blocks)
    print(f"state {state:,} floats; about {minutes:,.0f} minutes at {rate / 1e9:.0f} GFLOP/s here")


def rate_at(leg, step, cuts):
    """Learning rate of a step, after `cuts` cuts of a plateau: warm-up, then as the stage's schedule says."""
    stage, done, steps = leg.stage, step - leg.start, leg.stop - leg.start
    shape = stage.floor + (1 - stage.floor) * distill.SCHEDULES[stage.schedule](done / steps, cuts)
    return stage.lr * shape * min(1.0, (done + 1) / max(1, round(stage.warmup * steps)))


def cuts_in(values, patience=2):
    """How often a plateau schedule has cut the rate: each time so many validations in a row found no new least."""
    best, stale, cuts = math.inf, 0, 0
    for value in values:
        best, stale = (value, 0) if value < best else (best, stale + 1)
        if stale == patience:
            stale, cuts = 0, cuts + 1
    return cuts


def optimizer_for(student, stage):
    """AdamW over exactly what the stage trains; weights of linear layers and the embedding decay, nothing else does."""
    groups, params = {}, dict(student.named_parameters())
    for name in distill.trainable(student, stage.trains):
        decay, p = 0.1 if name.endswith(".weight") and params[name].dim() == 2 else 0.0, params[name]
        groups.setdefault((stage.rates.get(distill.role(name), 1.0), decay, is_sharded(p)), []).append(p)
    rows = [{"params": ps, "rate": rate, "weight_decay": decay} for (rate, decay, _), ps in groups.items()]
    return torch.optim.AdamW(rows, lr=stage.lr, betas=(0.9, 0.95), fused=True)


# ------------------------------------------------------------------ checkpoints


def checkpoint(run, step, optimizer):
    """Write step-N of a run whole or not at all (temporary name, fsync, rename); keep it and the one before."""
    names = {id(p): name for name, p in run.student.named_parameters()}
    files = {"model": surgery.plain_weights(run.student)}  # every process has a part in gathering what is sharded
    files["optimizer"] = {"rng": torch.get_rng_state()}
    for p, state in optimizer.state.items():
        files["optimizer"] |= {f"{names[id(p)]}|{k}": surgery.whole(v) for k, v in state.items()}
    if parts := {k: w for k, w in run.student.state_dict().items() if ".parametrizations." in k}:
        files["lora"] = parts  # the model beside it has them merged
    if RANK == 0:
        write(run, step, files)
    together()


def write(run, step, files):
    """A checkpoint's files, {name: {name: tensor}}, onto the disk."""
    from safetensors.torch import save_file

    folder, kept = run.folder, find_checkpoint(run.folder)
    target, temporary = folder / f"step-{step:08d}", folder / "step.tmp"
    where = f"{kept.name} is whole" if kept else "there was none before"
    if not all(w.isfinite().all() for w in files["model"].values()):
        raise BadInput(f"step {step}: weights are not finite and were not saved; {where}; try a smaller --lr")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        surgery.save_about(run.student.config, run.tokenizer, temporary)
        for name, tensors in files.items():
            save_file(tensors, temporary / f"{name}.safetensors")
        for file in temporary.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    except Exception as error:  # safetensors has its own error for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise BadInput(f"saving step {step} in {folder} failed ({error}); {where}; make room and --resume") from None
    for old in surgery.checkpoints(folder)[:-2]:
        shutil.rmtree(old)


def restore(folder, optimizer, student):
    """The moments and the random state of a checkpoint, back into a fresh optimizer."""
    from safetensors.torch import load_file

    with reading(folder, "delete this step and --resume from the one before"):
        if (folder / "lora.safetensors").exists():
            student.load_state_dict(load_file(folder / "lora.safetensors"), strict=False)
        saved = load_file(folder / "optimizer.safetensors")
        torch.set_rng_state(saved.pop("rng"))
        params = {id(p): name for name, p in student.named_parameters()}
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if f"{params[id(p)]}|step" not in saved:
                continue  # it has had no gradient yet
            for field in ("step", "exp_avg", "exp_avg_sq"):
                value = saved.pop(f"{params[id(p)]}|{field}")
                optimizer.state[p][field] = value if field == "step" else part_of(value.to(p.device), p)
        if saved:
            raise ValueError(f"{len(saved)} moments of parameters that this stage does not train")


def open_run(args):
    """-> what the args.json of the run says, {} for a new one; BadInput if the flags say otherwise."""
    folder = Path(args.out)
    if not args.resume:
        if folder.exists() and not args.dry_run:
            raise BadInput(f"--out {folder} exists; add --resume to continue it, or give another --out")
        return {}
    if not (folder / "args.json").exists():
        raise BadInput(f"--resume: no run in {folder}; leave out --resume to start one")
    theirs = surgery.read_json(folder / "args.json")
    if type(theirs.get("tokens")) is not int:
        raise BadInput(f"--resume: {folder}/args.json does not say how many tokens; start the run again")
    free = evaluate.MACHINE - {"device"}
    for key, value in vars(args).items():
        if key not in free and theirs.get(key, value) != value and not (key == "tokens" and value is None):
            raise BadInput(f"--resume: {folder} was started with {key} = {theirs.get(key)!r}, not {value!r}")
    args.tokens = theirs["tokens"]
    return theirs


def record(run):
    """What must be known to repeat the run, before step 1."""
    from safetensors.torch import save_file

    temporary = run.folder.with_name(f".{run.folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a kill
    temporary.mkdir(parents=True)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    facts = {
        "source": run.student.config.source,
        "text": run.text.checksum,
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
    }
    save_file({"tokens": run.text.held}, temporary / "heldout.safetensors")
    (temporary / "args.json").write_text(json.dumps(vars(run.args) | facts, indent=1))
    temporary.rename(run.folder)


# ------------------------------------------------------------------ the loop


@dataclasses.dataclass
class Run:
    """What a run is made of."""

    args: argparse.Namespace
    folder: Path
    student: torch.nn.Module
    teacher: torch.nn.Module  # None in a pretraining
    tokenizer: object
    text: Text
    legs: list
    dtype: torch.dtype
    facts: dict = None  # for scores.json

    def autocast(self):
        return evaluate.autocast(self.args.device, self.dtype)


def train(run, first):
    """Every leg from step `first` on: save -> cheap validation -> stop -> step -> log."""
    args, end, metrics = run.args, run.legs[-1].stop, run.folder / "metrics.jsonl"
    began, optimizer, trained = time.time(), None, 0
    bar = tqdm(total=end, initial=first, unit="step", dynamic_ncols=True, disable=RANK > 0)
    with bar, reopen(metrics, first) as log:
        together()
        found = [row for row in rows_of(metrics) if "heldout" in row]
        for step in range(first, end + 1):
            leg = next((leg for leg in run.legs if step < leg.stop), run.legs[-1])
            stage = leg.stage
            if optimizer is None or step == leg.start:
                optimizer = enter(run, stage, resumed=optimizer is None and step != leg.start)
                bar.write(f"step {step}: stage {stage.loss}, {stage.trains} trains, lr {stage.lr:g} {stage.schedule}")
            saves = step % args.save_every == 0 or step == end
            if saves and step > first:
                checkpoint(run, step, optimizer)
            if saves or validates(leg, step):
                found.append({"step": step} | validate(run, stage))
                log.write(json.dumps(found[-1]) + "\n")
                bar.write(f"step {step}: held-out {found[-1]['heldout'].upper()} {found[-1]['value']:.3f}")
            if step == end:
                break
            own = [row["own"] for row in found if "own" in row and validates(leg, row["step"])]
            lr = rate_at(leg, step, cuts_in(own))
            row = leg.row + (step - leg.start) * leg.sequences
            tokens = run.text.rows(row, leg.sequences, args.seed, leg.length).to(args.device)
            losses = one_step(run, tokens, stage, optimizer, lr)
            trained += tokens.numel()
            speed = trained / (time.time() - began)
            facts = {"step": step, "stage": stage.loss, "lr": lr, "tokens_per_s": round(speed, 1)}
            log.write(json.dumps(facts | losses) + "\n")
            if bad := [name for name, value in losses.items() if not math.isfinite(value)]:
                checkpoint(run, step, optimizer)
                told = f"step {step}, stage {stage.loss}: {bad[0]} is {losses[bad[0]]} at lr {lr:g} ({losses})"
                raise BadInput(f"{told}; the weights before it are saved; start another --out with a smaller --lr")
            bar.set_postfix(stage=stage.loss, loss=f"{losses['loss']:.3f}", tokens_per_s=f"{speed:.0f}")
            bar.update()
    distill.set_lora(run.student, 0)


def validates(leg, step):
    """Is this where a leg validates, whatever is saved: its first step, and every tenth of it under a plateau?"""
    steps = leg.stop - leg.start
    every = max(steps // 10, 1) if leg.stage.schedule == "plateau" else steps
    return step >= leg.start and (step - leg.start) % every == 0


def enter(run, stage, resumed):
    """The optimizer of a stage, LoRA merged and added as it says; resumed: in the middle of it, as last saved."""
    distill.set_lora(run.student, 0)
    distill.set_lora(run.student, stage.lora)
    optimizer = optimizer_for(run.student, stage)
    if resumed:
        restore(find_checkpoint(run.folder), optimizer, run.student)
    return optimizer


@torch.no_grad()
def validate(run, stage, sequences=4):
    """On a few held-out windows -> {"heldout": "kl" to the teacher, or "ce", "value": nats a token}.

    "ce", of what is to be learned, where there is no teacher and where a stage learns answers. "own": the stage's own
    loss, which a plateau schedule waits for. One window at a time, as not to need more memory than a step.
    """
    held = run.text.held[:sequences].to(run.args.device)
    value = lambda stage: loss_of(run, held, stage, range(len(held)), 1)["loss"]
    name, usual = ("kl", "logits") if run.teacher and stage.loss != "sft" else ("ce", "sft")
    own = {"own": value(stage)} if stage.schedule == "plateau" else {}
    return agreed({"heldout": name, "value": value(distill.Stage(usual, 1.0, 0.0))} | own)


def calm(student, longest=10.0):
    """From now on, where a block begins, no token's gradient is longer than `longest` times its sequence's median.

    A token at the edge of becoming a massive activation (arXiv 2402.17762) can have one hundreds of times the others';
    a mixer without decay, near one mean for all tokens, takes tokens there, and then they alone decide the step and
    training breaks down (results/gradients.md). Tokens without a gradient do not count.
    """

    def shorter(g):
        lengths = g.norm(dim=-1, keepdim=True)  # (B, T, 1)
        median = lengths.masked_fill(lengths == 0, math.nan).nanmedian(1, keepdim=True).values.nan_to_num()
        return g * (longest * median / lengths.clamp(min=1e-30)).clamp(max=1)

    def watch(block, args):
        if args[0].requires_grad:
            args[0].register_hook(shorter)

    for block in student.blocks:
        block.register_forward_pre_hook(watch)


def clip(params, longest):
    """Scale the gradients so that together they are no longer than that -> their length before."""
    parts = [[p for p in params if is_sharded(p) == which] for which in (False, True)]
    norms = [surgery.whole(torch.nn.utils.get_total_norm([p.grad for p in part])) for part in parts if part]
    norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    for part in parts:
        torch.nn.utils.clip_grads_with_norm_(part, longest, norm)
    return float(norm)


def rows_of(metrics):
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def reopen(path, first):
    """metrics.jsonl to append to, without the rows of steps that a kill undid (its last line may be half)."""
    if RANK:
        return open(os.devnull, "w")
    with reading(path, "restore or delete it"):
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] < first]
    path.write_text("".join(line + "\n" for line in kept))
    return path.open("a", buffering=1)


def one_step(run, tokens, stage, optimizer, lr):
    """One optimizer step -> the stage's losses and the gradient norm, as numbers; no step if they are not finite."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["rate"]
    optimizer.zero_grad()
    losses = loss_of(run, tokens, stage, range(len(tokens))[RANK::WORLD], run.args.micro_batch or len(tokens))
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    losses = add_up(losses, [p.grad for p in params if not is_sharded(p)])
    losses["grad_norm"] = clip(params, 1.0)
    if all(map(math.isfinite, losses.values())):
        optimizer.step()
    return losses


def loss_of(run, tokens, stage, mine, at_once):
    """What the sequences `mine` of tokens add to a stage's losses, as numbers, and to the gradients, if they are on."""
    (tokens, learn), losses = distill.unmark(tokens), {}
    counts = learn[:, 1:].sum(1).double() if stage.loss == "sft" else torch.ones(len(tokens))  # what a sequence weighs
    for rows in torch.tensor(mine).split(at_once):
        part = (counts[rows].sum() / counts.sum().clamp(min=1)).item()
        options = stage.options | ({"learn": learn[rows]} if stage.loss == "sft" else {})
        backward = lambda loss, part=part: (loss * part).backward()
        with run.autocast():
            found = distill.STAGES[stage.loss](run.student, run.teacher, tokens[rows], backward, **options)
        losses = {name: losses.get(name, 0.0) + part * float(value) for name, value in found.items()}
    return losses


# ------------------------------------------------------------------ more than one process


def join():
    """Meet the processes that torchrun started; the first alone speaks and writes."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def together():
    """Wait for all of them."""
    if WORLD > 1:
        dist.barrier()


def agreed(value):
    """The first one's."""
    told = [value]
    if WORLD > 1:
        dist.broadcast_object_list(told)
    return told[0]


def add_up(losses, gradients):
    """Sum gradients, in place, and losses over the processes, each of which had its sequences of the step.

    After the backward pass, not in DistributedDataParallel's hooks: these want one forward of the whole model, and a
    stage goes back layer by layer.
    """
    if WORLD == 1:
        return losses
    where = "cuda" if torch.cuda.is_available() else "cpu"
    sums = torch.tensor(list(losses.values()), dtype=torch.float64, device=where)
    for work in [dist.all_reduce(x, async_op=True) for x in (sums, *gradients)]:
        work.wait()
    return dict(zip(losses, sums.tolist()))


def spread(model, shard):
    """The first one's weights in every process; shard: each keeps a part of every block's (FSDP2), also of a teacher.

    A unit is what a stage calls by itself. Embedding, last norm and head stay whole, as a stage calls them piece by
    piece. The first call is the root's, which makes it that.
    """
    if WORLD == 1 or model is None:
        return
    for x in model.state_dict().values():
        dist.broadcast(x.detach(), 0)
    if not shard:
        return
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    outside = {p for name, p in model.named_parameters() if not name.startswith("blocks.")}
    for block in model.blocks:
        for unit in (block.norm1, block.mixer, block.norm2, block.mlp):
            fully_shard(unit)
        register_fsdp_forward_method(block.mixer, "matrix")
    fully_shard(model, ignored_params=outside)
    register_fsdp_forward_method(model, "trunk")
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)  # a sum, as in `add_up`
            unit.set_force_sum_reduction_for_comms(True)  # by other operations gloo does not have
    with torch.no_grad():
        model.trunk(torch.zeros(1, 1, dtype=torch.long, device=model.embed.weight.device))


def is_sharded(p):
    """Has this process a part of it only?"""
    return hasattr(p, "full_tensor")


def part_of(value, p):
    """This process's part of a whole tensor, sharded as p is."""
    if not is_sharded(p):
        return value.view_as(p)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.view(p.shape), p.device_mesh, p.placements)


# ------------------------------------------------------------------ the end


def picture(folder):
    """metrics.jsonl -> loss.png: the loss of each stage, and the held-out KL."""
    rows = rows_of(folder / "metrics.jsonl")
    with evaluate.figure(folder / "loss.png", figsize=(8, 4.5)) as ax:
        for name in dict.fromkeys(r["stage"] for r in rows if "stage" in r):
            points = [(r["step"], r["loss"]) for r in rows if r.get("stage") == name]
            ax.plot(*zip(*points), linewidth=1, alpha=0.7, label=f"{name} loss")
        for name, words in {"kl": "held-out KL to the teacher (nats)", "ce": "held-out CE (nats)"}.items():
            if points := [(r["step"], r["value"]) for r in rows if r.get("heldout") == name]:
                ax.plot(*zip(*points), "ko-", markersize=3, label=words)
        ax.set(xlabel="step", ylabel="loss", yscale="log", title=folder.name)
        ax.legend()


def finish(run, minutes):
    """The scoreboard, saved; the figure, a sample of both, and how to go on."""
    args, folder = run.args, run.folder
    with run.autocast():
        scores = evaluate.heldout(run.student, run.teacher, run.text.held.to(args.device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)
    facts = {"minutes": round(minutes, 1), "peak_gb": round(peak, 2), "tokens": args.tokens, "seed": args.seed}
    if RANK == 0:
        conclude(folder, scores | facts | run.facts)
    print("\n" + evaluate.scoreboard(scores))
    exercises = args.recipe == "recall"  # which nobody reads a sample of, nor scores elsewhere
    for name, model in () if exercises else (("teacher", run.teacher), ("student", run.student)):
        if model:
            print(f"\n{name}: ", end="")
            with run.autocast():
                prompt = "The history of science shows that"
                surgery.stream(model, run.tokenizer, prompt, 60, temperature=0.7, top_p=0.9, seed=args.seed)
    print(f"\n{minutes:.1f} minutes, peak memory {peak:.1f} GiB. Student, loss.png and scores.json are in {folder}")
    if not exercises:
        more = "" if run.teacher else f"; its student: python train.py --teacher {folder}"
        print(f"score it:      python evaluate.py {folder} --tasks lambada,piqa --limit 500{more}")


def conclude(folder, scores):
    """scores.json, which says that a run is finished, and away with what would have taken it further."""
    picture(folder)
    (folder / "scores.json.tmp").write_text(json.dumps(scores, indent=1))
    (folder / "scores.json.tmp").replace(folder / "scores.json")
    *older, last = surgery.checkpoints(folder)
    for waste in older:
        shutil.rmtree(waste)
    for name in ("optimizer.safetensors", "lora.safetensors"):
        (last / name).unlink(missing_ok=True)


def models(args):
    """-> (teacher or None, tokenizer, student)."""
    keep, auto, options = options_of(args)
    if args.teacher == "none":
        named = args.tokenizer not in (None, "bytes")
        usual = surgery.bytes_tokenizer(512 if args.size == "mqar" else 0)
        tokenizer = surgery.teacher_tokenizer(args.tokenizer) if named else usual
        options |= {"window": args.window} if args.window else {}
        torch.manual_seed(args.seed)
        with reading(f"--mixer {args.mixer} --option {args.option}", "see README's table of options"):
            student = surgery.from_scratch(args.size, args.family, tokenizer, args.mixer, args.context, **options)
        return None, tokenizer, student.to(args.device)
    teacher, tokenizer = surgery.load_teacher(args.teacher, device=args.device)
    shape = teacher.config
    if set(shape.mixers) != {"softmax"}:
        raise BadInput(f"--teacher {args.teacher}: no softmax model but {shape.mixers[0]}; give a teacher")
    if args.context > shape.context:
        raise BadInput(f"--context {args.context}: this teacher was trained on at most {shape.context}")
    if auto >= shape.layers:
        raise BadInput(f"--keep {args.keep}: wanted fewer than this teacher's {shape.layers} layers")
    if args.student:
        student, _ = surgery.load(args.student, device=args.device)
        if any(getattr(student.config, name) != getattr(shape, name) for name in ("vocab", "width", "layers")):
            raise BadInput(f"--student {args.student}: not of --teacher {args.teacher}; leave --teacher out")
        student.origin, student.left_out = {name: "copied" for name, _ in student.named_parameters()}, []
        return teacher, tokenizer, student
    torch.manual_seed(args.seed)
    student = surgery.linearize(teacher, args.mixer, window=args.window, keep=keep, **options)
    return teacher, tokenizer, student.to(args.device)


class Busy(BadInput):
    """Another process is at this run."""


def distil(args, *, go_on=False):
    """One run, from its flags to its scoreboard; go_on: --resume if there is something to resume."""
    folder = Path(args.out)
    mark = surgery.CACHE / "locks" / f"{hashlib.sha1(str(folder.resolve()).encode()).hexdigest()}-{RANK}"
    mark.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(mark, timeout=0):
            args.resume = folder.exists() if go_on else args.resume
            begun = open_run(args)
            newest = find_checkpoint(folder) if begun else None
            together()  # all have looked before the first one writes
            if begun and (folder / "scores.json").exists():
                print(f"{folder} is finished; score it with: python evaluate.py {folder}")
            else:
                go(args, begun, newest)
    except Timeout:
        raise Busy(f"{folder}: another process trains there; wait for it, or give another --out") from None


def go(args, begun, newest):
    """What a run is made of, its plan, every step, the scoreboard."""
    began = time.time()
    run = planned(args, begun)
    if args.dry_run:
        return
    if not begun and RANK == 0:
        record(run)
    start(run, newest)
    run.student.recompute = args.recompute
    run.facts = {"parameters": sum(p.numel() for p in run.student.parameters()), "processes": WORLD}
    run.facts["state"] = sum(block.mixer.state_size(args.context) for block in run.student.blocks)
    for model in (run.student, run.teacher):
        spread(model, args.shard)
    if run.teacher:
        calm(run.student)
    train(run, int(newest.name.split("-")[1]) if newest else 0)
    finish(run, (time.time() - began) / 60)


def planned(args, begun):
    """The models, the text and the legs, told and checked -> Run; begun: what its args.json says, if it has one."""
    dtype, why = evaluate.precision(args.device, args.precision)
    matmuls = f"{str(dtype).removeprefix('torch.')} matmuls: {why}"
    print(f"device: {args.device}, {torch.get_num_threads()} threads; {matmuls}; state in float32")
    if WORLD > 1:
        print(f"{WORLD} processes, {'a part of the weights' if args.shard else 'all weights'} in each")
    teacher, tokenizer, student = models(args)
    if begun and begun.get("source") != student.config.source:
        raise BadInput(f"--resume: {args.out} began from another teacher, {begun.get('source')}; start a new run")
    recipe, rate = recipe_of(args, student), flops_per_second(args.device, dtype)
    args.tokens = args.tokens or tokens_for(student, recipe, rate)
    legs, text = plan(args, recipe), read_text(args, tokenizer)
    if begun and begun.get("text") != text.checksum:
        raise BadInput(f"--resume: the text of --data {args.data} has changed since {args.out} began; start a new run")
    surgery.report(student)
    n = text.first.numel()
    if max(args.calibrate * args.context, *(leg.length for leg in legs)) > n:
        raise BadInput(f"--data {args.data}: {n:,} tokens are too few for --calibrate or a longer context")
    announce(args, student, legs, rate, dtype)
    return Run(args, Path(args.out), student, teacher, tokenizer, text, legs, dtype)


def tokens_for(student, recipe, rate):
    """Nine minutes of steps on this machine: with loading and scoring ten."""
    return max(int(540 * rate / sum(s.fraction * flops_per_token(student, s) for s in recipe) / 10_000), 1) * 10_000


def read_text(args, tokenizer):
    """The Text of --data, and a line about it."""
    began, text = time.time(), Text(args, tokenizer)
    if args.recipe in ("sft", "recall") and not text.header["chats"]:
        told = f"--recipe {args.recipe} --data {args.data}: no chats in it"
        raise BadInput(f"{told}; give rows with 'messages' (or mqar:8)")
    name, more = args.data or "docstrings of Python, torch and numpy", "" if text.header["last"] else ", more as needed"
    told = f"{text.first.numel():,} tokens to train on{more}, {len(text.held)} windows held out"
    print(f"data: {name}: {told}, {time.time() - began:.0f} s to read")
    return text


def recipe_of(args, student):
    """The stages of --recipe with --lr and --rates in them; BadInput if this student cannot go through one."""
    recipe = []
    for stage in distill.RECIPES[args.recipe]:
        try:
            distill.check_stage(stage, student)
        except ValueError as error:
            raise BadInput(f"--recipe {args.recipe} --mixer {args.mixer}: {error}") from None
        if stage.lora and args.shard:
            raise BadInput(f"--recipe {args.recipe} --shard: its LoRA is not for sharded weights; leave --shard out")
        recipe.append(dataclasses.replace(stage, lr=args.lr or stage.lr, rates=rates_of(args) or stage.rates))
    return recipe


def start(run, newest):
    """Freeze the teacher; take the student of the newest checkpoint, or calibrate it and choose for --keep auto:K."""
    args, student, original = run.args, run.student, run.teacher  # which share weights that the student trains
    if original:
        run.teacher = copy.deepcopy(original).to(run.dtype).requires_grad_(False)
    if newest:
        run.student = surgery.load(newest, device=args.device)[0]
        return
    rows = lambda first, n: distill.unmark(run.text.rows(first, n, args.seed).to(args.device))[0]
    auto = 0 if args.student else options_of(args)[1]
    with run.autocast():
        if args.calibrate:
            found = distill.calibrate(student, run.teacher, rows(0, args.calibrate))
            told = ", ".join(f"{ridge:g}: {kl:.2f}" for ridge, kl in found.items())
            print(f"calibrated W_o on {args.calibrate - 1} windows; ridge: KL on one more, which decides: {told}")
        whole, ranks = distill.rank_layers(student, run.teacher, rows(args.calibrate, 2)) if auto else (0.0, [])
    for _, i in ranks[:auto]:
        student.blocks[i].mixer, student.config.mixers[i] = copy.deepcopy(original.blocks[i].mixer), "softmax"
    if auto:
        told = ", ".join(f"{i}: {kl:.3f} ({kl - whole:+.3f})" for kl, i in ranks)
        print(f"KL {whole:.3f}; with one layer softmax again: {told}")
        print(f"--keep {args.keep} keeps {','.join(str(i) for i in sorted(i for _, i in ranks[:auto]))}")


# ------------------------------------------------------------------ sweeps


def sweep(runs):
    """Every run that is not finished, one after the other; then the report. Another process may be at it as well."""
    folder = Path(runs[0].out)
    if not all(args.tokens for args in runs):
        raise BadInput("a sweep compares runs of equal budgets: give --tokens")
    name_runs(runs, folder)
    for args in runs:
        args.resume = Path(args.out).exists()
        open_run(args)
    predict(runs)
    if runs[0].dry_run:
        return
    broken, elsewhere = [], []
    for i, args in enumerate(runs):
        print(f"\n--- run {i + 1} of {len(runs)}: {args.out}")
        try:
            distil(args, go_on=True)
        except Busy:
            elsewhere.append(Path(args.out).name)
        except Exception as error:
            if WORLD > 1:
                raise  # the others may not have it
            broken.append(Path(args.out).name)
            print(f"broken: {args.out}: {error}", file=sys.stderr)
            if not isinstance(error, BadInput):
                traceback.print_exc()
    if RANK == 0:
        evaluate.report_runs(folder)
    if elsewhere:
        print(f"left to another process: {', '.join(elsewhere)}")
    if broken:
        raise BadInput(f"{len(broken)} of {len(runs)} runs are broken: {', '.join(broken)}; the table has the others")


def name_runs(runs, folder):
    """Give each its own folder in `folder`, where nothing but runs and their report may be."""
    for left in folder.iterdir() if folder.exists() else ():
        if not (left / "args.json").exists() and left.stem != "results" and left.name[0] != ".":
            raise BadInput(f"--out {left}: no run of a sweep; move it away, or give another --out")
    told = {name: {str(getattr(args, name)) for args in runs} for name in ("option", "tokens", "lr")}
    for args in runs:
        more = [f"{name}={getattr(args, name)}" for name in ("tokens", "lr") if len(told[name]) > 1]
        more += args.option if len(told["option"]) > 1 else []
        args.out = str(folder / "-".join([name_of(args), *more]))
    if twice := {args.out for args in runs if sum(other.out == args.out for other in runs) > 1}:
        raise BadInput(f"{min(twice)}: two runs of this sweep would be there; a value stands twice, or names are alike")


def predict(runs):
    """Print what each run will take; BadInput where one cannot be."""
    dtype, _ = evaluate.precision(runs[0].device, runs[0].precision)
    rate, total, built = flops_per_second(runs[0].device, dtype), 0.0, None
    for args in runs:
        if (Path(args.out) / "scores.json").exists():
            print(f"{args.out:<60} finished")
            continue
        shape = (args.teacher, args.size, args.mixer, args.window, args.keep, args.option, args.student)
        if shape != built:
            student, built = models(args)[2], shape
        _, needed, minutes = costs(args, student, plan(args, recipe_of(args, student)), dtype, rate)
        total += minutes
        print(f"{args.out:<60}{minutes:>6,.0f} minutes{max(needed):>7.1f} GiB")
    print(f"{len(runs)} runs, about {total:,.0f} minutes; given again, the command goes on where it was")


def main():
    """A run, a sweep of them, or the report of one."""
    if WORLD > 1:
        join()
    runs = [read_flags(words) for words in points(sys.argv[1:])]
    if runs[0].report:
        return evaluate.report_runs(Path(runs[0].report))
    runs[0].out = runs[0].out or ("runs/sweep" if len(runs) > 1 else f"runs/{name_of(runs[0])}")
    sweep(runs) if len(runs) > 1 else distil(runs[0])
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    surgery.cli(main)
