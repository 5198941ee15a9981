"""Scores: how much of the teacher a student kept, each figure with its standard error and the teacher's beside it.

    python evaluate.py RUN                                          held-out text of the run: CE, KL, agreement
    python evaluate.py RUN --tasks lambada,piqa --limit 500         items from the hub
    python evaluate.py 140m --tasks lambada --data-dir FOLDER       a teacher alone, items from local files

A task is a row of TASKS: where its items are and how one becomes (context, choices, answer). Likelihoods only, zero
shots. Results are printed and written to RUN/evaluation.json. `python mixers.py` has its table and its picture from
here. Nothing here trains.
"""

import difflib
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from tqdm import tqdm

from distill import layers, reach, unmark
from mixers import MIXERS, build
from surgery import BadInput, Parser, cli, load_teacher, read_json, reading, transplant

# ------------------------------------------------------------------ the machine


def precision(device, wanted="auto"):
    """-> (dtype of matmuls, the reason in words). State, sums and softmax stay in float32 either way."""
    if wanted != "auto":
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[wanted], "as asked"
    kind = torch.device(device).type
    if kind == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = kind == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    words = "has bf16 matrix instructions" if fast else "has no bf16 matrix instructions"
    return torch.bfloat16 if fast else torch.float32, f"this {device} {words}"


def autocast(device, dtype):
    """Matmuls in dtype; nothing to do in float32."""
    return torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype != torch.float32)


# ------------------------------------------------------------------ held-out text


@torch.no_grad()
def heldout(student, teacher, tokens, batch=4):
    """tokens (n, T) -> {"ce", "teacher_ce", "kl", "agreement"}: (mean, standard error over the n sequences).

    In nats per token; agreement: the share of positions where both put the same token first. No teacher: "ce" alone.
    """
    tokens = unmark(tokens)[0]
    rows = {"ce": []} | ({"teacher_ce": [], "kl": [], "agreement": []} if teacher else {})
    for x in tokens.split(batch):
        ours, theirs = (model and model.trunk(x)[0] for model in (student, teacher))
        for i, ids in enumerate(x):  # one sequence at a time: T × vocabulary floats
            log_p = F.log_softmax(student.head(ours[i, :-1]).float(), -1)
            rows["ce"].append(F.nll_loss(log_p, ids[1:]).item())
            if not teacher:
                continue
            log_t = F.log_softmax(teacher.head(theirs[i, :-1]).float(), -1)
            rows["teacher_ce"].append(F.nll_loss(log_t, ids[1:]).item())
            rows["kl"].append(F.kl_div(log_p, log_t, log_target=True, reduction="none").sum(-1).mean().item())
            rows["agreement"].append((log_p.argmax(-1) == log_t.argmax(-1)).double().mean().item())
    return {name: mean_and_error(values) for name, values in rows.items()}


def mean_and_error(values):
    """-> (mean, standard error of the mean; nan for a single value)."""
    values = torch.tensor(values, dtype=torch.float64)
    error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return values.mean().item(), error


# ------------------------------------------------------------------ tasks

TASKS = {  # local file, hub (dataset, configuration, split), item -> (context, choices, index of the right one | None)
    "lambada": (
        "lambada.jsonl",
        ("EleutherAI/lambada_openai", "default", "test"),
        lambda item: (
            (item["context"], [" " + item["continuation"].strip()], None)
            if "context" in item
            else (item["text"].rsplit(" ", 1)[0], [" " + item["text"].rsplit(" ", 1)[1]], None)
        ),
    ),
    "piqa": (
        "piqa.jsonl",
        ("baber/piqa", None, "validation"),
        lambda item: (
            (item["query"].removesuffix("Answer:").rstrip() + "\nAnswer:", item["choices"], item["gold"])
            if "query" in item
            else (f"Question: {item['goal']}\nAnswer:", [item["sol1"], item["sol2"]], item["label"])
        ),
    ),
}


def items_of(task, data_dir):
    """The items of a task from data_dir/**/<file>, else from the hub; BadInput says what was looked for."""
    name, hub, _ = TASKS[task]
    if data_dir:
        found = sorted(Path(data_dir).rglob(name)) or sorted(Path(data_dir).glob(f"{task}/*.jsonl"))
        if not found:
            raise BadInput(f"task {task!r}: no {name} under {data_dir}; without --data-dir the hub's {hub[0]} is taken")
        with reading(found[0]):
            return [json.loads(line) for line in found[0].read_text(encoding="utf-8").splitlines() if line.strip()]
    from datasets import load_dataset

    with reading(f"task {task!r} from the hub's {hub[0]}", f"or give --data-dir with {name} in it"):
        return list(load_dataset(hub[0], hub[1], split=hub[2]))


@torch.no_grad()
def likelihoods(model, tokenizer, pairs, *, batch=16, device="cpu"):
    """[(context, continuation)] -> [(log-likelihood of the continuation, is it the greedy one)], same order.

    A pair longer than the model's context raises BadInput: nothing is cut in silence.
    """
    encoded = []
    for context, continuation in pairs:
        both, start = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
        if len(both) > model.config.context:
            raise BadInput(f"an item has {len(both)} tokens, the model's context {model.config.context}; use --limit")
        encoded.append((both, start))
    order, results = sorted(range(len(encoded)), key=lambda i: -len(encoded[i][0])), {}
    bar = tqdm(total=len(encoded), desc="items", leave=False)
    for at in range(0, len(order), batch):
        group = order[at : at + batch]
        x = torch.full((len(group), len(encoded[group[0]][0])), tokenizer.eos)  # right padding: causal, so never read
        for row, i in enumerate(group):
            x[row, : len(encoded[i][0])] = torch.tensor(encoded[i][0])
        h = model.trunk(x.to(device))[0]
        for row, i in enumerate(group):
            ids, start = encoded[i]
            log_p = F.log_softmax(model.head(h[row, start - 1 : len(ids) - 1]).float(), -1).cpu()
            wanted = torch.tensor(ids[start:])
            greedy = bool((log_p.argmax(-1) == wanted).all())
            results[i] = (log_p.gather(-1, wanted[:, None]).sum().item(), greedy)
        bar.update(len(group))
    bar.close()
    return [results[i] for i in range(len(pairs))]


def score(model, tokenizer, task, items, **how):
    """-> {metric: (mean, standard error)}: acc, and for lambada perplexity of the last word (no error given)."""
    with reading(f"task {task!r}", "its items lack the fields that TASKS reads"):
        asked = [TASKS[task][2](item) for item in items]
    for i, (_, choices, answer) in enumerate(asked):
        if answer is not None and answer not in range(len(choices)):
            raise BadInput(
                f"task {task!r}: item {i} calls {answer!r} right among {len(choices)}; take a labelled split"
            )
    pairs = [(context, " " + c.lstrip() if answer is not None else c) for context, cs, answer in asked for c in cs]
    found = iter(likelihoods(model, tokenizer, pairs, **how))
    right, surprise = [], []
    for _, choices, answer in asked:
        got = [next(found) for _ in choices]
        best = max(range(len(got)), key=lambda i: got[i][0])
        right.append(float(got[0][1] if answer is None else best == answer))
        surprise.append(-got[0][0])
    scores = {"acc": mean_and_error(right)}
    if asked[0][2] is None:
        scores["ppl"] = (math.exp(sum(surprise) / len(surprise)), math.nan)
    return scores


# ------------------------------------------------------------------ the scoreboard


def scoreboard(held, tasks=()):
    """Rows (name, teacher, student, recovered) as a table. held: `heldout`'s; tasks: (name, teacher's, ours)."""
    bound = lambda error, form: "" if math.isnan(error) else f" ± {error:{form}}"
    show = lambda pair, form=".3f": f"{pair[0]:{form}}" + bound(pair[1], form)
    lines = [f"{'':<22}{'teacher':>18}{'student':>18}{'recovered':>12}"]
    if held and "teacher_ce" not in held:
        lines.append(f"{'held-out CE (nats)':<22}{'-':>18}{show(held['ce']):>18}")
    elif held:
        t, s = held["teacher_ce"], held["ce"]
        lines.append(f"{'held-out CE (nats)':<22}{show(t):>18}{show(s):>18}")
        lines.append(f"{'perplexity':<22}{math.exp(t[0]):>18.2f}{math.exp(min(s[0], 700)):>18.2f}")
        lines.append(f"{'KL to the teacher':<22}{'0':>18}{show(held['kl']):>18}")
        lines.append(f"{'same top token':<22}{'1':>18}{show(held['agreement']):>18}{held['agreement'][0]:>12.1%}")
    for name, theirs, ours in tasks:
        for metric in ours:
            share = (
                f"{ours[metric][0] / theirs[metric][0]:.1%}" if theirs and metric == "acc" and theirs[metric][0] else ""
            )
            left = show(theirs[metric]) if theirs else "-"
            lines.append(f"{name + ' ' + metric:<22}{left:>18}{show(ours[metric]):>18}{share:>12}")
    return "\n".join(lines)


# ------------------------------------------------------------------ the mixers, side by side


@torch.no_grad()
def print_mixers(T=2048):
    """Print what each mixer adds to attention's weights, its state, a token's cost, and how far its forms differ."""
    config = SimpleNamespace(width=576, heads=9, kv_heads=3, head_dim=64, rope_base=1e5)  # SmolLM2-135M
    print(f"One layer, width {config.width}, {config.heads} heads of {config.head_dim}; softmax after {T} tokens.")
    print("new: weights beside q, k, v, o. state: floats. MFLOP of a token: 2 a weight, 4 to 9 a number of S.")
    print("MB of a token: weights in bf16 and the state in float32 read, a state that does not grow written too.\n")
    print(f"{'mixer':<12}{'decay':<9}{'write':<9}{'new':>9}{'state':>9}{'MFLOP':>7}{'MB':>7}{'differ':>8}  source")
    x = torch.randn(1, 200, config.width)
    for name, cls in MIXERS.items():
        mixer = build(name, config)
        loop, fast = (mixer(x, form=form)[0] for form in ("recurrent", "chunked"))
        weights, state = sum(p.numel() for p in mixer.parameters()), mixer.state_size(T)
        new = weights - sum(getattr(mixer, n).weight.numel() for n in "qkvo")
        S = mixer(x[:, :1])[1].get("S", torch.empty(T, config.heads, config.head_dim)).numel()
        each = 4 + (cls.decay in ("head", "channel")) + {"delta": 2, "own key": 4}.get(cls.write, 0)
        moved = 2 * weights + (4 if name == "softmax" else 8) * state
        row = f"{name:<12}{cls.decay:<9}{cls.write:<9}{new:>9,}{state:>9,}{(2 * weights + S * each) / 1e6:>7.2f}"
        source = re.search(r"arXiv ([\d.]+\d)|$", cls.__doc__ or "")[1] or ""
        print(f"{row}{moved / 1e6:>7.2f}{(loop - fast).abs().max():>8.0e}  {source}")


SENTENCE = "The cat sat on the mat, and the dog sat on the rug. When the cat saw the dog, the cat left the mat."


@torch.no_grad()
def draw_mixers(path, teacher_name, columns=5):
    """One row a mixer at its start, the teacher's attention first: what some heads mix, each row of T over its largest.

    Red adds, blue takes away; the root of the value is drawn, so that small weights show.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    teacher, tokenizer = load_teacher(teacher_name)
    inputs = [x for _, x, *_ in layers(teacher, teacher, torch.tensor([tokenizer.encode(SENTENCE)]))]
    places = [(len(inputs) * (2 * i + 1) // (2 * columns), 2 * i % teacher.config.heads) for i in range(columns)]
    fig, axes = plt.subplots(len(MIXERS), columns, figsize=(2 * columns, 2 * len(MIXERS)), squeeze=False)
    for row, name in zip(axes, MIXERS):
        row[0].set_ylabel(name)
        for ax, (layer, head) in zip(row, places):
            attention = teacher.blocks[layer].mixer
            mixer = attention if name == "softmax" else transplant(attention, build(name, teacher.config))
            mixer.remember(reach(attention, inputs[layer]))
            A = mixer.matrix(inputs[layer])[0, head]
            A = A / A.abs().amax(-1, keepdim=True).clamp(min=1e-9)
            ax.imshow((A.sign() * A.abs().sqrt()).float().numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
            ax.set(xticks=[], yticks=[], title=f"layer {layer}, head {head}" if name == "softmax" else "")
    fig.savefig(path, dpi=80, bbox_inches="tight")


def parser():
    """Every flag."""
    p = Parser(description="Score a run beside its teacher, or a teacher alone.", allow_abbrev=False)
    p.add_argument("model", help="a run folder, or anything --teacher of train.py takes")
    p.add_argument("--tasks", default="", help=f"comma list of {', '.join(TASKS)} (default: held-out text only)")
    p.add_argument("--limit", type=int, default=0, help="only the first N items of a task (default 0: all)")
    p.add_argument("--data-dir", help="folder with the tasks' .jsonl files (default: the hub)")
    p.add_argument("--baseline", help="teacher to stand beside it (default: the run's own)")
    p.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"], help="matmuls (default auto)")
    p.add_argument("--prompt", help="also continue this text, greedily")
    p.add_argument("--chat", action="store_true", help="the prompt is a user's turn, in the model's chat template")
    return p


def main():
    """Score a model, and the teacher beside it; in a run, write evaluation.json."""
    from surgery import stream

    args = parser().parse_args()
    tasks = [t for t in args.tasks.split(",") if t]
    if args.limit < 0:
        raise BadInput(f"--limit {args.limit}: wanted 0 (all items) or more")
    for task in tasks:
        if task not in TASKS:
            near = difflib.get_close_matches(task, TASKS, 1) or list(TASKS)
            raise BadInput(f"task {task!r} is not known; did you mean {near[0]!r}? There are {', '.join(TASKS)}")
    folder = Path(args.model)
    recorded = read_json(folder / "args.json") if (folder / "args.json").exists() else {}
    asked = {task: items_of(task, args.data_dir)[: args.limit or None] for task in tasks}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, why = precision(device, args.precision)
    print(f"precision: {str(dtype).removeprefix('torch.')} matmuls, {why}")
    model, tokenizer = load_teacher(args.model, dtype=dtype, device=device)
    baseline = args.baseline or recorded.get("teacher")
    baseline = None if baseline == "none" else baseline
    teacher = load_teacher(baseline, dtype=dtype, device=device)[0] if baseline else None
    if teacher and teacher.config.vocab != model.config.vocab:
        ids = f"it has {teacher.config.vocab} ids, the model {model.config.vocab}"
        raise BadInput(f"--baseline {baseline}: {ids}; give the model's own teacher")
    held, rows = None, []
    with autocast(device, dtype):
        if (folder / "heldout.safetensors").exists():
            from safetensors.torch import load_file

            with reading(folder / "heldout.safetensors", "delete it to score tasks alone"):
                held = heldout(model, teacher, load_file(folder / "heldout.safetensors")["tokens"].long().to(device))
        elif recorded:
            print(f"{folder}: no heldout.safetensors in it, so no held-out text is scored")
        for task, items in asked.items():
            theirs = score(teacher, tokenizer, task, items, device=device) if teacher else None
            rows.append((f"{task} ({len(items)})", theirs, score(model, tokenizer, task, items, device=device)))
        print(scoreboard(held, rows))
        if args.prompt:
            stream(model, tokenizer, args.prompt, 60, chat=args.chat)
    if recorded:  # scores of other tasks, from before, stay
        file = folder / "evaluation.json"
        before = read_json(file).get("tasks", []) if file.exists() else []
        kept = [row for row in before if row[0] not in [name for name, *_ in rows]]
        file.write_text(json.dumps({"heldout": held, "tasks": kept + rows, "precision": str(dtype)}))


if __name__ == "__main__":
    cli(main)
