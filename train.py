"""The only training loop: swap a teacher's attention for a linear mixer, distil, judge.

    python train.py --mixer delta --size 140m                       the whole thing; downloads nothing but the teacher
    python train.py --mixer gated_delta --window 64 --data book.txt a hybrid, on text of your own
    python train.py --mixer delta --size 140m --resume              go on after a kill, to the same bits

Top to bottom: flags -> data -> the plan -> checkpoints -> the loop -> the scoreboard. Losses and recipes: distill.py.
A run is a folder: args.json, metrics.jsonl, heldout.safetensors, step-N/ (a model that `evaluate.py` reads, and the
optimizer), scores.json, loss.png. The order of the data is a function of --seed and the step, nothing else.
"""

import argparse
import copy
import dataclasses
import difflib
import json
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for 2 MB pages: a tenth less memory, fewer page faults

import numpy as np
import torch
from tqdm import tqdm

import evaluate
from distill import RECIPES, STAGES, calibrate, trainable
from mixers import MIXERS
from surgery import (
    SIZES,
    SMALL,
    BadInput,
    Parser,
    bytes_tokenizer,
    checkpoints,
    cli,
    find_checkpoint,
    from_scratch,
    is_hub_name,
    linearize,
    load,
    load_teacher,
    read_json,
    reading,
    report,
    save,
    stream,
    teacher_tokenizer,
)

# ------------------------------------------------------------------ flags


def parser():
    """Every flag. One that may differ when a run goes on is also named in `open_run`."""
    p = Parser(description="Linearize a teacher and distil it.", allow_abbrev=False)
    g = p.add_argument_group("model")
    g.add_argument("--mixer", default="delta", help=f"what replaces attention: {', '.join(MIXERS)} (default delta)")
    g.add_argument("--size", default="140m", help=f"teacher by size: {', '.join([*SIZES, *SMALL])} (default 140m)")
    g.add_argument("--teacher", help="folder, hub name, .gguf or run, instead of --size; none: pretrain from scratch")
    g.add_argument(
        "--family", default="llama", choices=["llama", "gpt2"], help="style of --teacher none (default llama)"
    )
    g.add_argument("--tokenizer", help="of --teacher none: a teacher's, or bytes (default)")
    g.add_argument("--window", type=int, default=0, help="softmax over the last W tokens beside it (default 0: none)")
    g.add_argument("--keep", default="", help="layers left softmax, as 0,8,16 (default none)")
    g.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="a mixer's option, as conv=0")
    g = p.add_argument_group("data")
    g.add_argument(
        "--data", help="text, jsonl or parquet file, folder, or hub name (default: docstrings of Python, torch, numpy)"
    )
    g.add_argument("--context", type=int, default=512, help="tokens per sequence (default 512)")
    g = p.add_argument_group("training")
    g.add_argument("--recipe", choices=RECIPES, help="stages and rates (default: default; hybrid with --window)")
    g.add_argument("--tokens", type=count, help="budget over all stages, as 20k or 3b (default: ten minutes' worth)")
    g.add_argument(
        "--batch", type=int, help="sequences a step (default 1: steps count more than batch; pretraining 16)"
    )
    g.add_argument("--lr", type=float, help="one learning rate for all stages (default: the recipe's)")
    g.add_argument("--calibrate", type=int, help="sequences to calibrate on first (default 16, a hybrid 0)")
    g.add_argument("--seed", type=int, default=0, help="of new weights and the order of the data (default 0)")
    g = p.add_argument_group("run")
    g.add_argument("--out", help="folder of the run (default runs/MIXER-SIZE…)")
    g.add_argument("--resume", action="store_true", help="go on with the run in that folder")
    g.add_argument("--save-every", type=int, default=60, help="steps between checkpoints (default 60)")
    g = p.add_argument_group("machine")
    g.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or mps")
    g.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"], help="of matmuls (default auto)")
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
    "batch": (1, 2**20),
    "save_every": (1, 10**9),
    "window": (0, 2**20),
    "calibrate": (0, 2**20),
    "seed": (0, 2**31),
}


def read_flags():
    """The flags, checked and completed (recipe, calibrate, teacher, out)."""
    args = parser().parse_args()
    if args.mixer not in MIXERS:
        near = difflib.get_close_matches(args.mixer, MIXERS, 1, cutoff=0)
        raise BadInput(f"--mixer {args.mixer!r} is not known; did you mean {near[0]!r}? There are {', '.join(MIXERS)}")
    hybrid, scratch = args.window, args.teacher == "none"
    if (args.size in SMALL) != scratch and (scratch or not args.teacher):
        raise BadInput(
            f"--size {args.size} --teacher {args.teacher}: {', '.join(SMALL)} go with --teacher none, which pretrains "
            "them; give such a run as --teacher of the next one"
        )
    args.recipe = args.recipe or ("pretrain" if scratch else "hybrid" if hybrid else "default")
    if scratch != (args.recipe == "pretrain"):
        raise BadInput(f"--recipe {args.recipe} --teacher {args.teacher}: pretrain, and it alone, has no teacher")
    args.calibrate = (0 if hybrid or scratch else 16) if args.calibrate is None else args.calibrate
    args.batch = args.batch or (16 if scratch else 1)
    for name, (low, high) in RANGES.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise BadInput(f"--{name.replace('_', '-')} {value}: wanted a number from {low} to {high}")
    if args.calibrate == 1:
        raise BadInput("--calibrate 1: wanted 0, or at least 2 (one window chooses among the fits to the others)")
    if args.window > args.context:
        raise BadInput(
            f"--window {args.window}: wanted at most --context {args.context}; a wider one would never slide"
        )
    if args.mixer == "softmax" and args.recipe == "haller":
        raise BadInput("--mixer softmax --recipe haller: its first stage trains new mixers, here are none; try default")
    with reading(f"--device {args.device}", "try --device cpu"):
        if torch.device(args.device).type not in ("cpu", "cuda", "mps"):
            raise ValueError("not cpu, cuda or mps")
        torch.empty(0, device=args.device)
    args.teacher = args.teacher or args.size
    if args.tokenizer and not scratch:
        raise BadInput(f"--tokenizer {args.tokenizer}: a teacher brings its own; leave it out")
    window = f"-w{args.window}" if args.window else ""
    teacher = args.size if scratch else Path(args.teacher).name.removesuffix(".gguf").lower()
    args.out = args.out or f"runs/{args.mixer}-{teacher}{window}-s{args.seed}"
    return args


def options_of(args):
    """--keep and --option as `linearize` takes them."""
    try:
        keep = tuple(int(i) for i in args.keep.split(",") if i)
        options = {name: value_of(text) for name, text in (pair.split("=", 1) for pair in args.option)}
    except ValueError:
        raise BadInput(f"--keep {args.keep!r}, --option {args.option}: wanted 0,8,16 and NAME=VALUE") from None
    for name in options.keys() & {"teacher", "mixer", "window", "keep"}:
        raise BadInput(f"--option {name}={options[name]}: this has a flag of its own, --{name}")
    return {"keep": keep} | options


def value_of(text):
    """'true' -> True, 'none' -> None, '4' -> 4, and other text as it is."""
    words = {"true": True, "false": False, "none": None}
    return words.get(text.lower(), int(text) if text.isdecimal() else text)


# ------------------------------------------------------------------ data


def documents(source):
    """Yield texts: of a file, of every readable file of a folder, of a hub set, or of the installed documentation."""
    path = Path(source or "")
    if source is None:
        yield from documentation()
    elif path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in (".txt", ".md", ".jsonl", ".parquet"))
        if not files:
            raise BadInput(f"--data {source}: no .txt, .md, .jsonl or .parquet in this folder")
        for file in files:
            yield from texts_of(file)
    elif path.is_file():
        yield from texts_of(path)
    elif is_hub_name(source):
        yield from hub_texts(source)
    else:
        raise BadInput(f"--data {source}: no such file or folder; give one that exists, or a hub name such as a/b")


def texts_of(path):
    """The texts of one file: rows' 'text', or parts between lines <|endoftext|>."""
    with reading(f"--data {path}", "give UTF-8 text, or rows with a 'text' field"):
        if path.suffix == ".parquet":
            import pyarrow.parquet

            found = pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist()
        elif path.suffix == ".jsonl":
            found = (json.loads(line)["text"] for line in path.open(encoding="utf-8") if line.strip())
        else:
            found = (part for part in path.read_text(encoding="utf-8-sig").split("\n<|endoftext|>\n") if part.strip())
        yield from found


def hub_texts(name):
    """The 'text' of each row of a hub data set, streamed."""
    from datasets import load_dataset

    with reading(f"--data {name}", "check the network and the name on the hub, or give a local file"):
        for row in load_dataset(name, split="train", streaming=True):
            yield row["text"]


def documentation():
    """English that is on every machine with Python: docstrings of the standard library, torch and numpy, by package."""
    import ast
    import sysconfig

    roots = [Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent, Path(np.__file__).parent]
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            inside = file.relative_to(root).parts
            if "site-packages" in inside or "test" in inside or "tests" in inside:
                continue
            try:
                tree = ast.parse(file.read_bytes())
            except (SyntaxError, ValueError):
                continue
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
            found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
            text = "\n\n".join(doc for doc in found if doc and len(doc) > 200)
            if len(text) > 1000:
                yield text


def prepare(args, tokenizer, needed):
    """-> (training windows, at most 16 held-out ones), each (n, context): every 50th window of the text is held out.

    Documents are taken in order, an end-of-text token after each, until there are 20M tokens or as many as `needed`,
    whichever is more; a run that needs more than there is goes round again.
    """
    parts, total, start = [], 0, time.time()
    for text in documents(args.data):
        if not isinstance(text, str) or "\0" in text:
            raise BadInput(f"--data {args.data}: {text!r:.40} is no text; give UTF-8 text, or rows with a 'text' field")
        parts.append(np.array(tokenizer.encode(text) + [tokenizer.eos], np.int32))
        total += len(parts[-1])
        if total > max(needed, 20_000_000):
            break
    n = total // args.context
    if n < 2:
        raise BadInput(
            f"--data {args.data}: {total} tokens, but training and held-out text need a context of {args.context} "
            "each; give more text or a smaller --context"
        )
    windows = torch.from_numpy(np.concatenate(parts)[: n * args.context]).view(n, args.context)
    held = torch.arange(n) % 50 == min(n, 50) - 1
    shuffled = torch.randperm(int(held.sum()), generator=torch.Generator().manual_seed(0))[:16]
    name = args.data or "docstrings of Python, torch and numpy"
    took = f"{(n - int(held.sum())) * args.context:,} tokens to train on, {time.time() - start:.0f} s to read"
    print(f"data: {name}: {took}, {len(shuffled)} windows held out")
    return windows[~held], windows[held][shuffled].long()


def checksum(windows):
    """Which text this is, for --resume."""
    return f"{zlib.crc32(windows.numpy()):08x}"


def batch_at(windows, step, batch, seed):
    """Sequences of a step: rows of a permutation that seed and epoch fix, so that a resumed run reads the same."""
    places = torch.arange(step * batch, (step + 1) * batch)
    rows = []
    for epoch in sorted({int(p) // len(windows) for p in places}):
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed * 1000 + epoch))
        rows.append(order[places[places // len(windows) == epoch] % len(windows)])
    return windows[torch.cat(rows)].long()


# ------------------------------------------------------------------ the plan


def flops_per_token(model, stage):
    """Multiplications and additions of one token's step: 2 per weight forward, 4 backward, the teacher's forward."""
    head = model.config.vocab * model.config.width
    blocks = sum(p.numel() for p in model.blocks.parameters())
    mixers = sum(p.numel() for block in model.blocks for p in block.mixer.parameters())
    known = {"attention": 2 * blocks + 6 * mixers, "hidden": 8 * blocks, "ce": 6 * (blocks + head)}
    return known.get(stage.loss, 8 * (blocks + head))


def flops_per_second(device, dtype):
    """FLOP/s to expect of a training step: a third (measured, delta at 140m) of this machine's best at one matmul."""
    x, w = torch.randn(1024, 576, device=device, dtype=dtype), torch.randn(1536, 576, device=device, dtype=dtype)
    best = math.inf
    for _ in range(30):
        began = time.perf_counter()
        (x @ w.T)[0, 0].item()
        best = min(best, time.perf_counter() - began)
    return 2 * 1024 * 576 * 1536 / best / 3


def memory(model, tokens_a_step, dtype):
    """Bytes to expect at the peak: weights, gradients, moments, teacher, activations.

    Fitted to delta at 140m; mixers that keep more for the backward pass need more (rwkv7 8.6 GiB where this says 4.7).
    """
    c, size = model.config, sum(p.numel() for p in model.parameters())
    activations = 4 * tokens_a_step * c.layers * (16 * c.width + 4 * c.ffn)
    return (16 + dtype.itemsize) * size + activations + 16 * min(tokens_a_step, 512) * c.vocab + 2**30


def plan(args, recipe):
    """-> [(stage, first step, end step)]: shares of --tokens in whole steps, at least one each."""
    rows, at = [], 0
    for stage in recipe:
        steps = max(round(args.tokens * stage.fraction / (args.batch * args.context)), 1)
        rows.append((stage, at, at + steps))
        at += steps
    return rows


def announce(args, student, stages, rate, dtype, windows):
    """Print steps, work, state, minutes and memory to expect; BadInput if memory or text is too small for the flags."""
    tokens = args.batch * args.context
    work = sum(flops_per_token(student, stage) * (stop - start) * tokens for stage, start, stop in stages)
    state = sum(block.mixer.state_size(args.context) for block in student.blocks)
    need, here = memory(student, tokens, dtype) / 2**30, math.inf
    if torch.device(args.device).type == "cpu" and hasattr(os, "sysconf"):
        here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if need > here or args.calibrate > windows:
        raise BadInput(
            f"--batch {args.batch} --context {args.context} --calibrate {args.calibrate}: too much for {here:.0f} GiB "
            f"(about {need:.0f} needed) or for {windows} windows of text; take less"
        )
    print(f"plan: {stages[-1][2]} steps, {args.tokens:,} tokens, {work / 1e12:.0f} TFLOP; state {state:,} floats")
    print(f"plan: about {work / rate / 60 + 1:.0f} minutes at {rate / 1e9:.0f} GFLOP/s here, {need:.1f} GiB")


def rate_at(stage, done):
    """Learning rate after the share `done` of a stage: 5% warm-up, then as the stage's schedule says."""
    shape = {
        "wsd": min(1.0, (1 - done) / 0.2),
        "cosine": 0.55 + 0.45 * math.cos(math.pi * done),
        "linear": 1 - done,
    }[stage.schedule]
    return stage.lr * min(1.0, (done + 1e-3) / 0.05) * shape


def optimizer_for(student, stage):
    """AdamW over exactly what the stage trains; weights of linear layers and the embedding decay, nothing else does."""
    names, params = trainable(student, stage.trains), dict(student.named_parameters())
    decays = [n for n in names if n.endswith(".weight") and params[n].dim() == 2]
    rest = [n for n in names if n not in decays]
    assert {id(params[n]) for n in names} == {id(p) for p in student.parameters() if p.requires_grad}
    groups = [{"params": [params[n] for n in ns], "weight_decay": wd} for ns, wd in ((decays, 0.1), (rest, 0.0)) if ns]
    return torch.optim.AdamW(groups, lr=stage.lr, betas=(0.9, 0.95), fused=True)


# ------------------------------------------------------------------ checkpoints


def checkpoint(folder, step, student, tokenizer, optimizer):
    """Write folder/step-N whole or not at all (temporary name, fsync, rename); keep it and the one before."""
    from safetensors.torch import save_file

    target, temporary, kept = folder / f"step-{step:08d}", folder / "step.tmp", find_checkpoint(folder)
    where = f"{kept.name} is whole" if kept else "there was none before"
    if not all(p.isfinite().all() for p in student.parameters()):
        raise BadInput(
            f"step {step}: weights are not finite and were not saved; {where}; start again with a smaller --lr"
        )
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        save(student, tokenizer, temporary)
        names = {id(p): name for name, p in student.named_parameters()}
        moments = {f"{names[id(p)]}|{k}": v for p, state in optimizer.state.items() for k, v in state.items()}
        save_file(moments | {"rng": torch.get_rng_state()}, temporary / "optimizer.safetensors")
        for file in temporary.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    except Exception as error:  # safetensors has its own error for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise BadInput(f"saving step {step} in {folder} failed ({error}); {where}; make room and --resume") from None
    for old in checkpoints(folder)[:-2]:
        shutil.rmtree(old)


def restore(folder, optimizer, student):
    """The moments and the random state of a checkpoint, back into a fresh optimizer."""
    from safetensors.torch import load_file

    with reading(folder, "delete this step and --resume from the one before"):
        saved = load_file(folder / "optimizer.safetensors")
        torch.set_rng_state(saved.pop("rng"))
        params = {id(p): name for name, p in student.named_parameters()}
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            for field in ("step", "exp_avg", "exp_avg_sq"):
                value = saved.pop(f"{params[id(p)]}|{field}")
                optimizer.state[p][field] = value if field == "step" else value.to(p.device).view_as(p)
        if saved:
            raise ValueError(f"{len(saved)} moments of parameters that this stage does not train")


def open_run(args):
    """-> (folder of the run, what its args.json says; {} for a new run)."""
    folder, kept = Path(args.out), ("resume", "out", "save_every")
    mine = {k: v for k, v in vars(args).items() if k not in kept}
    if not args.resume:
        if folder.exists():
            raise BadInput(f"--out {folder} exists; add --resume to continue it, or give another --out")
        return folder, {}
    if not (folder / "args.json").exists():
        raise BadInput(f"--resume: no run in {folder}; leave out --resume to start one")
    theirs = read_json(folder / "args.json")
    if type(theirs.get("tokens")) is not int:
        raise BadInput(f"--resume: {folder}/args.json does not say how many tokens; start the run again")
    for key, value in mine.items():
        if theirs.get(key) != value and not (key == "tokens" and value is None):
            raise BadInput(f"--resume: {folder} was started with {key} = {theirs.get(key)!r}, not {value!r}")
    args.tokens = theirs["tokens"]
    return folder, theirs


def record(folder, args, source, windows, tokens):
    """What must be known to repeat the run, before step 1."""
    from safetensors.torch import save_file

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name + "."))
    temporary.chmod(0o755)
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    facts = {
        "source": source,
        "text": checksum(windows),
        "commit": asked.stdout.strip() or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
    }
    save_file({"tokens": tokens}, temporary / "heldout.safetensors")
    (temporary / "args.json").write_text(json.dumps(vars(args) | facts, indent=1))
    temporary.rename(folder)


# ------------------------------------------------------------------ the loop


def train(args, folder, student, teacher, tokenizer, windows, held, stages, first, dtype):
    """Every row of `stages` from step `first` on: cheap validation -> save -> stop -> step -> log."""
    end, began, optimizer = stages[-1][2], time.time(), None
    bar = tqdm(total=end, initial=first, unit="step", dynamic_ncols=True)
    with bar, reopen(folder / "metrics.jsonl", first) as log:
        for step in range(first, end + 1):
            stage, start, stop = next((row for row in stages if row[1] <= step < row[2]), stages[-1])
            if optimizer is None or step == start:
                resumed = optimizer is None and step != start
                optimizer = optimizer_for(student, stage)
                if resumed:
                    restore(find_checkpoint(folder), optimizer, student)
                bar.write(f"step {step}: stage {stage.loss}, {stage.trains} trains, lr {stage.lr:g} {stage.schedule}")
            if step % args.save_every == 0 or step == end:
                with torch.no_grad(), evaluate.autocast(args.device, dtype):
                    name, loss = ("kl", "logits") if teacher else ("ce", "ce")
                    there = STAGES[loss](student, teacher, held[:4].to(args.device))[name].item()
                seen = {"step": step, "tokens": step * args.batch * args.context, f"heldout_{name}": there}
                log.write(json.dumps(seen) + "\n")
                bar.write(f"step {step}: held-out {name.upper()} {there:.3f}")
                if step > first:
                    checkpoint(folder, step, student, tokenizer, optimizer)
            if step == end:
                break
            lr = rate_at(stage, (step - start) / (stop - start))
            tokens = batch_at(windows, step, args.batch, args.seed).to(args.device)
            losses = one_step(student, teacher, tokens, stage, optimizer, lr, args, dtype)
            speed = (step + 1 - first) * args.batch * args.context / (time.time() - began)
            facts = {"step": step, "stage": stage.loss, "lr": lr, "tokens_per_s": round(speed, 1)}
            log.write(json.dumps(facts | losses) + "\n")
            bad = [name for name, value in losses.items() if not math.isfinite(value)]
            if bad:
                checkpoint(folder, step, student, tokenizer, optimizer)
                raise BadInput(
                    f"step {step}, stage {stage.loss}: {bad[0]} is {losses[bad[0]]} at lr {lr:g} ({losses}); "
                    "the weights before it are saved; start again with a smaller --lr and another --out"
                )
            bar.set_postfix(stage=stage.loss, loss=f"{losses['loss']:.3f}", tokens_per_s=f"{speed:.0f}")
            bar.update()


def reopen(path, first):
    """metrics.jsonl to append to, without the rows of steps that a kill undid (its last line may be half)."""
    with reading(path, "restore or delete it"):
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] < first]
    path.write_text("".join(line + "\n" for line in kept))
    return path.open("a", buffering=1)


def one_step(student, teacher, tokens, stage, optimizer, lr, args, dtype):
    """One optimizer step -> the stage's losses and the gradient norm, as numbers; no step if they are not finite."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    with evaluate.autocast(args.device, dtype):
        losses = STAGES[stage.loss](student, teacher, tokens, lambda loss: loss.backward(), **stage.options)
    losses = {name: float(value) for name, value in losses.items()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    losses["grad_norm"] = float(torch.nn.utils.clip_grad_norm_(params, 1.0))
    if all(map(math.isfinite, losses.values())):
        optimizer.step()
    return losses


# ------------------------------------------------------------------ the end


def picture(folder):
    """metrics.jsonl -> loss.png: the loss of each stage, and the held-out KL."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    fig, ax = plt.subplots(figsize=(8, 4.5))
    for name in dict.fromkeys(r["stage"] for r in rows if "stage" in r):
        points = [(r["step"], r["loss"]) for r in rows if r.get("stage") == name]
        ax.plot(*zip(*points), linewidth=1, alpha=0.7, label=f"{name} loss")
    for name, words in (("heldout_kl", "held-out KL to the teacher (nats)"), ("heldout_ce", "held-out CE (nats)")):
        if points := [(r["step"], r[name]) for r in rows if name in r]:
            ax.plot(*zip(*points), "ko-", markersize=3, label=words)
    ax.set(xlabel="step", ylabel="loss", yscale="log", title=folder.name)
    ax.legend()
    fig.savefig(folder / "loss.png", dpi=120, bbox_inches="tight")


def finish(args, folder, student, teacher, tokenizer, held, dtype, minutes):
    """The scoreboard, saved; the figure, a sample of both, and how to go on."""
    with evaluate.autocast(args.device, dtype):
        scores = evaluate.heldout(student, teacher, held.to(args.device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)
    facts = {"minutes": round(minutes, 1), "peak_gb": round(peak, 2), "tokens": args.tokens, "seed": args.seed}
    (folder / "scores.json").write_text(json.dumps(scores | facts, indent=1))
    picture(folder)
    print("\n" + evaluate.scoreboard(scores))
    for name, model in (("teacher", teacher), ("student", student)):
        if model:
            print(f"\n{name}: ", end="")
            with evaluate.autocast(args.device, dtype):
                prompt = "The history of science shows that"
                stream(model, tokenizer, prompt, 60, temperature=0.7, top_p=0.9, seed=args.seed)
    print(f"\n{minutes:.1f} minutes, peak memory {peak:.1f} GiB. Student, loss.png and scores.json are in {folder}")
    more = "" if teacher else f"; its student: python train.py --teacher {folder}"
    print(f"score it:      python evaluate.py {folder} --tasks lambada,piqa --limit 500{more}")


def models(args):
    """-> (teacher or None, tokenizer, student)."""
    if args.teacher == "none":
        named = args.tokenizer not in (None, "bytes")
        tokenizer = teacher_tokenizer(args.tokenizer) if named else bytes_tokenizer()
        given = options_of(args) | ({"window": args.window} if args.window else {})
        if given.pop("keep"):
            raise BadInput(f"--keep {args.keep}: a model from scratch has the same mixer in every layer")
        torch.manual_seed(args.seed)
        with reading(f"--mixer {args.mixer} --option {args.option}", "see README's table of options"):
            student = from_scratch(args.size, args.family, tokenizer, args.mixer, args.context, **given)
        return None, tokenizer, student.to(args.device)
    teacher, tokenizer = load_teacher(args.teacher, device=args.device)
    if set(teacher.config.mixers) != {"softmax"}:
        raise BadInput(f"--teacher {args.teacher}: no softmax model but {teacher.config.mixers[0]}; give a teacher")
    if args.context > teacher.config.context:
        raise BadInput(f"--context {args.context}: this teacher was trained on at most {teacher.config.context}")
    torch.manual_seed(args.seed)
    return teacher, tokenizer, linearize(teacher, args.mixer, window=args.window, **options_of(args)).to(args.device)


def main():
    """One run, from its flags to its scoreboard."""
    args, began = read_flags(), time.time()
    folder, begun = open_run(args)
    newest = find_checkpoint(folder) if begun else None
    dtype, why = evaluate.precision(args.device, args.precision)
    matmuls = f"{str(dtype).removeprefix('torch.')} matmuls: {why}"
    print(f"device: {args.device}, {torch.get_num_threads()} threads; {matmuls}; state in float32")
    teacher, tokenizer, student = models(args)
    source = student.config.source
    if begun and begun.get("source") != source:
        raise BadInput(f"--resume: {folder} was started from another teacher, {begun.get('source')}; start a new run")
    recipe = [dataclasses.replace(stage, lr=args.lr or stage.lr) for stage in RECIPES[args.recipe]]
    rate = flops_per_second(args.device, dtype)
    if not args.tokens:  # nine minutes of steps: the tenth goes to loading and scoring
        per_token = sum(stage.fraction * flops_per_token(student, stage) for stage in recipe)
        args.tokens = max(int(540 * rate / per_token / 10_000), 1) * 10_000
    windows, held = prepare(args, tokenizer, args.tokens)
    if begun and begun.get("text") != checksum(windows):
        raise BadInput(f"--resume: the text of --data {args.data} has changed since {folder} began; start a new run")
    report(student)
    if teacher:  # the student trains the weights that it shared
        teacher = copy.deepcopy(teacher).to(dtype).requires_grad_(False)
    stages = plan(args, recipe)
    announce(args, student, stages, rate, dtype, len(windows))
    if newest:
        student = load(newest, device=args.device)[0]
    elif not begun:
        record(folder, args, source, windows, held)
    if not newest and args.calibrate:
        with evaluate.autocast(args.device, dtype):
            found = calibrate(student, teacher, batch_at(windows, 0, args.calibrate, args.seed).to(args.device))
        told = ", ".join(f"{ridge:g}: {kl:.2f}" for ridge, kl in found.items())
        print(f"calibrated W_o on {args.calibrate - 1} windows; KL on one more by ridge: {told}; the least is taken")
    first = int(newest.name.split("-")[1]) if newest else 0
    if first == stages[-1][2] and (folder / "scores.json").exists():
        print(f"{folder} is finished; score it with: python evaluate.py {folder}")
        return
    train(args, folder, student, teacher, tokenizer, windows, held, stages, first, dtype)
    finish(args, folder, student, teacher, tokenizer, held, dtype, (time.time() - began) / 60)


if __name__ == "__main__":
    cli(main)
