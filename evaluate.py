"""Scores: how much of the teacher a student kept, each figure with its standard error and the teacher's beside it.

    python evaluate.py RUN                                          held-out text of the run: CE, KL, agreement
    python evaluate.py RUN OTHER_RUN --tasks lambada,piqa,arc_easy  items from the hub, the models compared in pairs
    python evaluate.py 140m --tasks lambada --data-dir FOLDER       a teacher alone, items from local files
    python evaluate.py RUN --decode                                 tokens a second and state against context

A task is a row of TASKS: where its items are and how one becomes a question. What a model answers is kept item by
item, so that a stopped scoring goes on and two models are compared on the same items. `python mixers.py` has its table
and its picture from here, and train.py the text it reads. Nothing here trains.
"""

import collections
import contextlib
import csv
import difflib
import functools
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import tempfile
import typing
import uuid
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from distill import layers, reach, unmark
from kernels import medians
from mixers import MIXERS, build
from surgery import (
    CACHE,
    SHAPE,
    BadInput,
    Config,
    Parser,
    cli,
    is_hub_name,
    load_teacher,
    read_json,
    reading,
    save_tokenizer,
    stream,
    transplant,
)

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
    words = f"this {device} has {'' if fast else 'no '}bf16 matrix instructions"
    return torch.bfloat16 if fast else torch.float32, words


def autocast(device, dtype):
    """Matmuls in dtype; nothing to do in float32."""
    return torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype != torch.float32)


# ------------------------------------------------------------------ text


def documents(source, flag="--data"):
    """Yield texts or chats: of a file, of a folder's readable files, of a hub set, or of installed documentation.

    flag: what asked for it, for messages.
    """
    path = Path(source or "")
    if source is None:
        yield from documentation()
    elif path.exists():
        inside = sorted(f for f in path.rglob("*") if f.suffix in (".txt", ".md", ".jsonl", ".parquet"))
        if path.is_dir() and not inside:
            raise BadInput(f"{flag} {source}: no .txt, .md, .jsonl or .parquet in this folder")
        for file in inside or [path]:
            yield from texts_of(file, flag)
    elif is_hub_name(source.split(":")[0]):
        yield from hub_texts(source, flag)
    else:
        raise BadInput(f"{flag} {source}: no such file or folder; give one that exists, or a hub name such as a/b")


def texts_of(path, flag):
    """The texts of one file, or its chats: rows' 'text' or 'messages', or parts between lines <|endoftext|>."""
    with reading(f"{flag} {path}", "give UTF-8 text, or rows with a field 'text' or 'messages'"):
        if path.suffix == ".parquet":
            import pyarrow.parquet

            parts = pyarrow.parquet.ParquetFile(path).iter_batches(columns=["messages", "text"])  # those that are there
            rows = (row for part in parts for row in part.to_pylist())
        elif path.suffix == ".jsonl":
            rows = (json.loads(line) for line in path.open(encoding="utf-8") if line.strip())
        else:
            parts = path.read_text(encoding="utf-8-sig").split("\n<|endoftext|>\n")
            rows = ({"text": part} for part in parts if part.strip())
        yield from map(row_of, rows)


def row_of(row):
    """The text or the chat of a row."""
    if "messages" in row and not isinstance(row["messages"], list):
        raise ValueError(f"'messages' is {row['messages']!r:.40}, wanted a list of turns")
    return row["messages"] if "messages" in row else row["text"]


def hub_texts(name, flag):
    """The 'text' or 'messages' of each row of a hub data set, streamed; name: owner/name[:configuration[:split]]."""
    from datasets import load_dataset

    name, config, split = (name.split(":") + ["", ""])[:3]
    with reading(f"{flag} {name}", "check the network and the name on the hub, or give a local file"):
        yield from map(row_of, load_dataset(name, config or None, split=split or "train", streaming=True))


def documentation():
    """English that is on every machine with Python: docstrings of the standard library, torch and numpy, by package."""
    import ast
    import sysconfig

    roots = [Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent, Path(np.__file__).parent]
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            if {"site-packages", "test", "tests"} & set(file.relative_to(root).parts):
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


def recall(pairs, length, seed=0):
    """Yield multi-query associative recall without end (MQAR, arXiv 2312.04927), `length` symbols each, 0 … 511.

    pairs × (key, value), then each key once more, sooner rather than later, with its value after it, between random
    symbols. Keys are below 256, values above. All but those last values stands as ~symbol: read, not learned.
    """
    g, slots = np.random.default_rng(seed), (length - 2 * pairs) // 2
    if not 0 < pairs <= min(slots, 256):
        raise BadInput(f"--data mqar:{pairs} --context {length}: wanted 1 to {min(length // 4, 256)} pairs in so many")
    chance = 0.01 * np.arange(1, slots + 1) ** (0.01 - 1)
    while True:
        keys, values = g.choice(256, pairs, replace=False), 256 + g.choice(256, pairs, replace=False)
        x = ~g.integers(0, 512, length)
        x[: 2 * pairs] = ~np.stack([keys, values], 1).flatten()
        at = 2 * pairs + 2 * g.choice(slots, pairs, replace=False, p=chance / chance.sum())
        x[at], x[at + 1] = ~keys, values
        yield x


# ------------------------------------------------------------------ held-out text


@torch.no_grad()
def heldout(student, teacher, tokens, block=512):
    """tokens (n, T) -> {"ce", "teacher_ce", "kl", "agreement"}: (mean, standard error over the n sequences).

    In nats per token; agreement: the share of positions where both put the same token first. No teacher: no more than
    "ce". Where only some tokens are learned, "answers" is the share of these that the student puts first.
    """
    (tokens, learn), rows = unmark(tokens), []
    marked = not learn.all()
    for ids, asked in zip(tokens, learn[:, 1:]):
        ours, theirs = (model and model.trunk(ids[None])[0][0, :-1] for model in (student, teacher))
        sums = collections.Counter()
        for at in range(0, len(ids) - 1, block):  # block × vocabulary floats at once
            part, following = slice(at, at + block), ids[1:][at : at + block]
            log_p = F.log_softmax(student.head(ours[part]).float(), -1)
            sums["ce"] += F.nll_loss(log_p, following, reduction="sum").item()
            if teacher:
                log_t = F.log_softmax(teacher.head(theirs[part]).float(), -1)
                sums["teacher_ce"] += F.nll_loss(log_t, following, reduction="sum").item()
                sums["kl"] += F.kl_div(log_p, log_t, log_target=True, reduction="sum").item()
                sums["agreement"] += (log_p.argmax(-1) == log_t.argmax(-1)).sum().item()
            if marked:
                sums["answers"] += (log_p.argmax(-1) == following)[asked[part]].sum().item()
        count = {"answers": max(asked.sum().item(), 1)}
        rows.append({name: total / count.get(name, len(ids) - 1) for name, total in sums.items()})
    return {name: mean_and_error([row[name] for row in rows]) for name in rows[0]}


def mean_and_sd(values):
    """-> (mean, standard deviation; nan for a single value)."""
    values = torch.tensor(values, dtype=torch.float64)
    return values.mean().item(), values.std().item() if len(values) > 1 else math.nan


def mean_and_error(values):
    """-> (mean, standard error of the mean)."""
    mean, deviation = mean_and_sd(values)
    return mean, deviation / math.sqrt(len(values))


# ------------------------------------------------------------------ tasks


class Choice(typing.NamedTuple):
    """The likeliest of some pairs (context, continuation) is the answer."""

    pairs: list
    answer: int
    group: str = ""  # subject or relation


class Exact(typing.NamedTuple):
    """The continuation of one pair must be the greedy one."""

    pairs: list


class Written(typing.NamedTuple):
    """Text that is generated must hold what is wanted, or come to the same number after "####"."""

    prompt: str
    wanted: str
    new: int  # tokens to generate
    until: tuple = ()  # what ends it


class Page(typing.NamedTuple):
    """A text to be predicted whole; words and bytes are those of the page before it was prepared."""

    text: str
    words: int
    bytes: int


class Task(typing.NamedTuple):
    """files: pattern under --data-dir; hub: dataset, configuration, split; ask: row (with its "shown") -> question."""

    files: str
    hub: tuple
    ask: typing.Callable
    mixed: bool = False  # --limit takes a fixed random choice, as the rows come sorted
    shown: tuple = ()  # (files, split) of the examples shown first, and how many unless --shots says otherwise
    shots: int = 0


def picked(pairs, answer, group=""):
    """A Choice; ValueError if none of the pairs is the answer, or one is no text or continues with nothing."""
    if type(answer) is not int or answer not in range(len(pairs)):
        raise ValueError(f"{answer!r} is right among {len(pairs)} choices: take a labelled split")
    if not all(isinstance(text, str) for pair in pairs for text in pair) or not all(c.strip() for _, c in pairs):
        raise ValueError(f"a choice is blank or no text: {pairs!r:.80}")
    return Choice(pairs, answer, group)


def choose(context, choices, answer, group=""):
    """A Choice by continuation."""
    return picked([(context, " " + choice) for choice in choices], answer, group)


def lambada(row):
    """The last word, from the hub's text or a local file's context and continuation."""
    context, _, last = row["text"].rpartition(" ") if "text" in row else (row["context"], "", row["continuation"])
    if not context or not last.strip():
        raise ValueError("a text without a last word")
    return Exact([(context, " " + last.strip())])


def hellaswag(row):
    """The likeliest ending, its text cleaned as lm-eval does it."""

    def plain(text):  # WikiHow's marks
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    if "ctx_b" in row:
        context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        row = {"ctx": context, "endings": row["endings"], "gold": row["label"]}
    return choose(plain(row["ctx"]), [plain(ending) for ending in row["endings"]], int(row["gold"]))


def piqa(row):
    """The better of two solutions."""
    if "goal" in row:
        row = {"query": row["goal"], "choices": [row["sol1"], row["sol2"]], "gold": int(row["label"])}
    return science(row)


def science(row):
    """ARC from the hub, and what local files have as query, choices, gold."""
    question = row["query"] if "query" in row else row["question"]
    choices, gold = row["choices"], row.get("gold")
    if isinstance(choices, dict):
        choices, gold = choices["text"], choices["label"].index(row["answerKey"])
    question = question.removesuffix("Answer:").removeprefix("Question:").strip()
    return choose(f"Question: {question}\nAnswer:", choices, gold)


def openbookqa(row):
    """The sentence's likeliest end."""
    return choose(row["question_stem"], row["choices"]["text"], row["choices"]["label"].index(row["answerKey"].strip()))


def winogrande(row):
    """Partial scoring: one continuation after two contexts."""
    if "sentence" in row:
        before, _, after = row["sentence"].partition("_")
        options = [before + row["option1"], before + row["option2"]]
        row = {"context_options": options, "continuation": after.strip(), "gold": int(row["answer"]) - 1}
    return picked([(context, " " + row["continuation"]) for context in row["context_options"]], row["gold"])


def mmlu(row, letters=False):
    """letters: the choices are listed and the model names one; else it gives the answer's words (cloze)."""

    def said(r):
        return list("ABCD"[: len(r["choices"])]) if letters else r["choices"]

    def block(r):
        if not letters:
            return f"Question: {r['question'].strip()}\nAnswer:"
        return r["question"].strip() + "".join(f"\n{n}. {c}" for n, c in zip(said(r), r["choices"])) + "\nAnswer:"

    kind = "multiple choice questions" if letters else "questions"
    about = f"The following are {kind} (with answers) about {row['subject'].replace('_', ' ')}.\n\n"
    examples = "".join(f"{block(r)} {said(r)[int(r['answer'])]}\n\n" for r in row["shown"])
    return choose(about + examples + block(row), said(row), int(row["answer"]), row["subject"])


def bear(row):
    """Which of the relation's answers makes the likeliest sentence (arXiv 2404.04113, first template)."""
    sentences = [row["template"].replace("[X]", row["sub_label"]).replace("[Y]", y) for y in row["answers"]]
    return picked([("", sentence) for sentence in sentences], row["answer_idx"], row["relation"])


def gsm8k(row):
    """Worked examples, then the number after ####, or the last number."""
    if "####" not in row["answer"]:
        raise ValueError("an answer without its number after ####")
    examples = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in row["shown"])
    return Written(f"{examples}Question: {row['question']}\nAnswer:", row["answer"], 256, ("Question:",))


def wikitext(row):
    """A page, its marks undone as lm-eval does it."""
    page = row["page"]
    text = page.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for left, right in (r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"), ('"', '"'), ("'", "'"):
        text = re.sub(rf"{left}\s*([^{right}]*?)\s*{right}", rf"{left[-1]}\1{right[-1]}", text)
    for marks in ("= = = =", "= = =", "= ="):
        text = text.replace(marks, marks.replace(" ", ""))
    for old, new in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(old, new)
    return Page(text, len(re.split(r"\s+", page)), len(page.encode()))


MMLU = "mmlu/test/*.csv", ("cais/mmlu", "all", "test")
TASKS = {
    "lambada": Task("lambada*.jsonl", ("EleutherAI/lambada_openai", "default", "test"), lambada),
    "hellaswag": Task("hellaswag*.jsonl", ("Rowan/hellaswag", None, "validation"), hellaswag),
    "piqa": Task("piqa*.jsonl", ("baber/piqa", None, "validation"), piqa),
    "arc_easy": Task("arc_easy*.jsonl", ("allenai/ai2_arc", "ARC-Easy", "test"), science),
    "arc_challenge": Task("arc_challenge*.jsonl", ("allenai/ai2_arc", "ARC-Challenge", "test"), science),
    "winogrande": Task("winogrande*.jsonl", ("allenai/winogrande", "winogrande_xl", "validation"), winogrande),
    "openbookqa": Task("openbookqa*.jsonl", ("allenai/openbookqa", "main", "test"), openbookqa),
    "mmlu": Task(*MMLU, mmlu, True, ("mmlu/dev/*.csv", "dev")),
    "mmlu_letters": Task(*MMLU, functools.partial(mmlu, letters=True), True, ("mmlu/dev/*.csv", "dev"), 5),
    "bear": Task("bear/P*.jsonl", None, bear, True),
    "wikitext": Task("wiki.test.raw", ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test"), wikitext),
    "gsm8k": Task(
        "gsm8k/test.jsonl", ("openai/gsm8k", "main", "test"), gsm8k, shown=("gsm8k/train.jsonl", "train"), shots=5
    ),
}


def rows_of(task, data_dir, files, hub):
    """The rows of a task from data_dir/**/<files>, else from the hub; BadInput says what was looked for."""
    if not data_dir and not hub:
        raise BadInput(f"task {task!r} is not on the hub; give --data-dir with its authors' {files} in it")
    if not data_dir:
        from datasets import load_dataset

        with reading(f"task {task!r} from the hub's {hub[0]}", f"or give --data-dir with {files} in it"):
            return list(load_dataset(hub[0], hub[1], split=hub[2]))
    found = sorted(Path(data_dir).rglob(files))
    if not found:
        raise BadInput(f"task {task!r}: no {files} under {data_dir}" + (f"; the hub has {hub[0]}" if hub else ""))
    rows = []
    for file in found:
        with reading(file):
            rows += local_rows(file)
    return rows


def local_rows(file):
    """The rows of one file: jsonl; MMLU's csv; WikiText's raw pages; BEAR's relations and the metadata beside them."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".csv":
        rows, subject = csv.DictReader(io.StringIO(text)), file.stem.removesuffix("_test").removesuffix("_dev")
        return [row | {"choices": [row[f"choice{i}"] for i in range(4)], "subject": subject} for row in rows]
    if file.suffix == ".raw":
        starts = [m.start() for m in re.finditer(r"^ = [^=]+ = \n", text, flags=re.M)] + [len(text)]
        return [{"page": text[a:b]} for a, b in zip(starts, starts[1:])]
    rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    if file.parent.name == "bear":
        about = read_json(file.parent / "metadata_relations.json")[file.stem]
        more = {"relation": file.stem, "template": about["templates"][0], "answers": about["answer_space_labels"]}
        rows = [row | more for row in rows]
    return rows


def questions_of(name, data_dir, limit=0, shots=None):
    """The questions of a row of TASKS; BadInput for items without what it reads, or without a labelled answer."""
    task, before = TASKS[name], {}
    rows = rows_of(name, data_dir, task.files, task.hub)
    if task.mixed and limit:
        random.Random(0).shuffle(rows)
    shots = (task.shots if shots is None else shots) if task.shown else 0
    with reading(f"task {name!r}", "give items with the fields that TASKS reads"):
        for row in rows_of(name, data_dir, task.shown[0], (*task.hub[:2], task.shown[1])) if shots else ():
            before.setdefault(row.get("subject"), []).append(row)
        shown = lambda row: {"shown": before.get(row.get("subject"), [])[:shots]}
        asked = [task.ask(row | shown(row)) for row in rows[: limit or None]]
    if not asked:
        raise BadInput(f"task {name!r}: no items; give files that have some")
    return asked


NIAH = ("niah_1", "niah_2", "niah_3")
KNOWN = ", ".join([*TASKS, *NIAH])
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ADJECTIVES = ("amber", "brave", "calm", "daring", "eager", "gentle", "jolly", "keen", "mellow", "noble", "quiet")
NOUNS = ("anchor", "basket", "candle", "dragon", "engine", "forest", "garden", "hammer", "island", "kettle", "lantern")
KEYS = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]


def needles(level, tokens, tokenizer, text, n, new=64, seed=0, keys=1):
    """n questions of RULER's needle in a haystack (arXiv 2404.06654), prompt and answer within `tokens` tokens.

    level 1: the haystack repeats five sentences; 2: it is `text`; 3: and the value is a UUID. Depths are random. keys:
    so many needles, one of which is asked for (RULER's "multi-key").
    """
    kind, draw, made = "uuid" if level == 3 else "number", random.Random(f"{seed} {level} {tokens}"), []
    hay, between = ([NOISE], "\n") if level == 1 else (text.split(), " ")
    if not hay:
        raise BadInput("--haystack: no words in it; give a text")
    sizes = [len(tokenizer.encode(between + unit)) for unit in hay]
    before = f"A special magic {kind} is hidden within the following text. Make sure to memorize it."
    before += f" I will quiz you about the {kind} afterwards.\n"
    valued = lambda: str(uuid.UUID(int=draw.getrandbits(128))) if level == 3 else str(draw.randint(10**6, 10**7 - 1))
    for _ in range(n):
        values = {key: valued() for key in draw.sample(KEYS, keys)}
        key, value = next(iter(values.items()))
        asked = f"\nWhat is the special magic {kind} for {key} mentioned in the provided text?"
        asked += f" The special magic {kind} for {key} mentioned in the provided text is"
        told = [f"One of the special magic {kind}s for {key} is: {value}." for key, value in values.items()]
        room = tokens - new - len(tokenizer.encode(before + between.join(told) + asked)) - 4
        at, units = draw.randrange(len(hay)), []
        if room < sizes[at]:
            words = f"needles, question and answer alone take {tokens - room}; wanted more"
            raise BadInput(f"--lengths {tokens} (--context, for train.py's --needles): {words}")
        while room >= sizes[at % len(hay)]:
            units.append(hay[at % len(hay)])
            room, at = room - sizes[at % len(hay)], at + 1
        ends = [0, *([i + 1 for i, unit in enumerate(units) if unit[-1] in ".!?"] or range(len(units) + 1))]
        for at, needle in sorted(((draw.choice(ends), needle) for needle in told), reverse=True):
            units.insert(at, needle)
        made.append(Written(before + between.join(units) + asked, value, new))
    return made


@functools.cache
def haystack(source, size=1_000_000):
    """About `size` characters of a text to hide needles in."""
    text = ""
    for document in documents(source, "--haystack"):
        if not isinstance(document, str):
            raise BadInput(f"--haystack {source}: chats; give a text")
        text += document + "\n"
        if len(text) > size:
            break
    return text[:size]


# ------------------------------------------------------------------ what a model answers


def encode_pair(tokenizer, context, continuation, longest):
    """-> (ids, where the continuation starts, was the beginning cut): cut in two, and to `longest` read tokens, as
    lm-eval does it."""
    bare = context.rstrip()
    context, continuation = bare, context[len(bare) :] + continuation
    first = [] if tokenizer.bos is None else [tokenizer.bos]
    if not context:
        first = first or [tokenizer.eos]
    before = first + tokenizer.encode(context)
    ids = before + (first + tokenizer.encode(context + continuation))[len(before) :]
    over = max(len(ids) - 1 - longest, 0)  # the last one is predicted, not read
    return ids[over:], max(len(before) - over, 1), over > 0


def windows_of(tokenizer, text, longest):
    """A text side by side in windows of `longest` read tokens, each predicted once, as lm-eval -> [(ids, start)]."""
    ids, pairs = tokenizer.encode(text), []
    first = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
    for at in range(0, len(ids), longest):
        end = min(at + longest, len(ids))
        begin = max(end - longest, 0)  # the last one, if short, sees as much as the others
        pairs.append(([ids[begin - 1] if begin else first, *ids[begin:end]], at - begin + 1))
    return pairs


@torch.no_grad()
def likelihoods(model, pairs, *, at_once=2048):
    """[(ids, start)] -> [(log-likelihood of ids[start:], are they greedy)], same order, `at_once` tokens at a time."""
    order, results = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0])), {}
    while order:
        longest = max(len(pairs[order[0]][0]) - 1, 1)  # a token alone, with nothing after it, is read too
        group, order = order[: max(at_once // longest, 1)], order[max(at_once // longest, 1) :]
        rows = [torch.tensor(pairs[i][0]) for i in group]
        x = pad_sequence([ids[:longest] for ids in rows], batch_first=True)  # on the right: causal, never read
        for i, ids, h in zip(group, rows, model.trunk(x.to(model.embed.weight.device))[0]):
            start, total, greedy = pairs[i][1], 0.0, True
            for part, wanted in zip(h[start - 1 : len(ids) - 1].split(512), ids[start:].split(512)):
                log_p = F.log_softmax(model.head(part).float(), -1).cpu()
                total += log_p.gather(-1, wanted[:, None]).sum().item()
                greedy &= bool((log_p.argmax(-1) == wanted).all())
            results[i] = total, greedy
    return [results[i] for i in range(len(pairs))]


@torch.no_grad()
def generate(model, tokenizer, prompts, new, *, until=(), piece=2048):
    """Greedy texts after prompts, all at once -> [(text, do prompt and text go beyond the context)].

    Shorter prompts are padded on the left, which changes nothing; they are read `piece` tokens at a time. Only learned
    positions have an end, and cut what does not fit.
    """
    first = [] if tokenizer.bos is None else [tokenizer.bos]
    encoded = [first + tokenizer.encode(prompt) or [tokenizer.eos] for prompt in prompts]
    places = max(model.config.context - new, 1) if model.config.learned else max(map(len, encoded))
    kept, found, over = [ids[-places:] for ids in encoded], [[] for _ in prompts], set()
    longest, state, device = max(map(len, kept)), None, model.embed.weight.device
    x = torch.tensor([[tokenizer.eos] * (longest - len(ids)) + ids for ids in kept], device=device)
    mask = torch.tensor([[False] * (longest - len(ids)) + [True] * len(ids) for ids in kept], device=device)
    for ids, real in zip(x.split(piece, 1), mask.split(piece, 1)):
        h, state = model.trunk(ids, state, mask=None if real.all() else real)
    for _ in range(new):
        token = model.head(h[:, -1]).argmax(-1)
        for i, t in enumerate(token.tolist()):
            if i not in over:
                found[i] += [] if t in tokenizer.stops else [t]
                text = tokenizer.decode(found[i][-24:])
                over |= {i} if t in tokenizer.stops or any(word in text for word in until) else set()
        if len(over) == len(prompts):
            break
        h, state = model.trunk(token[:, None], state)
    texts = [tokenizer.decode(ids) for ids in found]
    texts = [min((text.split(word)[0] for word in until), key=len, default=text) for text in texts]
    sizes = [len(ids) + len(more) for ids, more in zip(encoded, found)]
    return [(t, len(ids) > places or n > model.config.context) for t, ids, n in zip(texts, encoded, sizes)]


def answers(model, tokenizer, questions, file=None, *, chunk=None, title=""):
    """What the model answers to each question -> [dict]; `file` keeps them, a chunk at a time, and has them again."""
    keys, done = [hashlib.sha1(repr(q).encode()).hexdigest()[:16] for q in questions], {}
    if file is not None and file.exists():
        with reading(file, "delete it"):
            whole, end, half = file.read_bytes().rpartition(b"\n")
            if half:  # a kill came in the middle of a line
                os.truncate(file, len(whole) + len(end))
            rows = map(json.loads, filter(None, whole.decode().split("\n")))
            done = {row["key"]: row for row in rows if "ll" in row or "beyond" in row}
    left = [i for i, key in enumerate(keys) if key not in done]
    left.sort(key=lambda i: len(getattr(questions[i], "prompt", "")))
    chunk = chunk or (128 if hasattr(questions[0], "pairs") else 8)
    with tqdm(total=len(questions), initial=len(questions) - len(left), desc=title, leave=False) as bar:
        for at in range(0, len(left), chunk):
            part = left[at : at + chunk]
            for i, row in zip(part, answer([questions[i] for i in part], model, tokenizer)):
                done[keys[i]] = {"key": keys[i]} | row
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("a", encoding="utf-8") as log:
                    log.writelines(json.dumps(done[keys[i]]) + "\n" for i in part)
            bar.update(len(part))
    return [done[key] for key in keys]


def answer(questions, model, tokenizer):
    """-> one dict a question, all of one kind."""
    if isinstance(questions[0], Written):
        prompts, (_, _, new, until) = [q.prompt for q in questions], questions[0]
        together = max(8192 // max(len(tokenizer.encode(prompt)) for prompt in prompts), 1)
        parts = [prompts[at : at + together] for at in range(0, len(prompts), together)]
        texts = [pair for part in parts for pair in generate(model, tokenizer, part, new, until=until)]
        return [{"text": text, "beyond": beyond} for text, beyond in texts]
    longest = model.config.context
    if isinstance(questions[0], Page):
        asked = [windows_of(tokenizer, q.text, min(longest, 2048)) for q in questions]
    else:
        asked = [[encode_pair(tokenizer, *pair, longest) for pair in q.pairs] for q in questions]
    found = iter(likelihoods(model, [pair[:2] for pairs in asked for pair in pairs]))
    rows = []
    for q, pairs in zip(questions, asked):
        lls = [next(found) for _ in pairs]
        if isinstance(q, Page):
            rows.append({"ll": sum(ll for ll, _ in lls), "tokens": sum(len(ids) - start for ids, start in pairs)})
        else:
            rows.append({"ll": [ll for ll, _ in lls], "greedy": lls[0][1], "beyond": any(pair[2] for pair in pairs)})
    return rows


def beyond(title, answered, config):
    """How many items go beyond the context; says so, and if they were cut: prompts at rotary positions are not."""
    if count := sum(row.get("beyond", row.get("cut", False)) for row in answered):  # cut: as it was called before
        how = "read whole" if "text" in answered[0] and not config.learned else "their beginnings are cut"
        print(f"{title}: {count} of {len(answered)} items go beyond the context of {config.context}; {how}")
    return count


def number_in(text):
    """What a worked solution comes to: the number after ####, else the last one."""
    found = re.findall(r"#### (-?[0-9.,]+)", text)[:1] or re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)[-1:]
    return found[0].replace(",", "").rstrip(".") if found else None


def metrics(questions, answered):
    """-> {metric: values by item}; a perplexity's are (log-likelihood, words | bytes | tokens)."""
    both, kind = list(zip(questions, answered)), type(questions[0])
    if kind is Page:
        counts = {"word_ppl": [q.words for q in questions], "byte_ppl": [q.bytes for q in questions]}
        counts |= {"token_ppl": [a["tokens"] for a in answered]}
        return {name: [(a["ll"], n) for a, n in zip(answered, ns)] for name, ns in counts.items()}
    if kind is Written:
        same = lambda text, wanted: number_in(text) == number_in(wanted) if "####" in wanted else wanted in text
        return {"acc": [float(same(a["text"], q.wanted)) for q, a in both]}
    if kind is Exact:
        return {"acc": [float(a["greedy"]) for a in answered], "ppl": [(a["ll"][0], 1) for a in answered]}
    right = lambda q, values: float(np.argmax(values) == q.answer)
    by_size = lambda q, a: [ll / max(len(c) - 1, 1) for ll, (_, c) in zip(a["ll"], q.pairs)]
    found = {"acc": [right(q, a["ll"]) for q, a in both]}
    if len({c for _, c in questions[0].pairs}) > 1:  # winogrande's continuations are all the same
        found["acc_norm"] = [right(q, by_size(q, a)) for q, a in both]
    return found


def summary(values):
    """Values by item -> (score, standard error): their mean, or the perplexity of (log-likelihood, count) pairs."""
    if not isinstance(values[0], tuple | list):
        return mean_and_error(values)
    ll, n = torch.tensor(values, dtype=torch.float64).T
    rate = ll.sum() / n.sum()
    spread = ((ll - rate * n).square().sum() * len(n) / max(len(n) - 1, 1)).sqrt() / n.sum()  # of a ratio of sums
    ppl = math.exp(min(-rate.item(), 700))
    return ppl, ppl * spread.item() if len(n) > 1 else math.nan


def recovered(ours, theirs, draws=1000):
    """Share of the teacher's accuracy on the same items -> (value, 2.5%, 97.5%) by resampling items."""
    both = torch.tensor([ours, theirs], dtype=torch.float64)
    rows = torch.randint(len(ours), (draws, len(ours)), generator=torch.Generator().manual_seed(0))
    a, b = both[:, rows].sum(-1)
    low, high = torch.quantile(a / b.clamp(min=0.5), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return (both[0].sum() / both[1].sum()).item(), low, high


def mcnemar(a, b):
    """-> (items that only a has right, only b, p of so uneven a split if both were as good): the exact test."""
    only_a, only_b = sum(x > y for x, y in zip(a, b)), sum(y > x for x, y in zip(a, b))
    n, least = only_a + only_b, min(only_a, only_b)
    return only_a, only_b, min(1.0, 2 * sum(math.comb(n, k) for k in range(least + 1)) / 2**n)


# ------------------------------------------------------------------ the scoreboard

MEASURES = {"ce": "CE", "gap": "gap in CE", "kl": "KL", "agreement": "same top token", "answers": "answers right"}


def show(pair):
    """'0.654 ± 0.021'."""
    return f"{pair[0]:.3f}" + ("" if math.isnan(pair[1]) else f" ± {pair[1]:.3f}")


def record(found, own):
    """A task's scores as evaluation.json keeps them: (score, standard error, items), and shares of the teacher's."""
    shares = {k: recovered(v, own[k]) for k, v in found.items() if k.startswith("acc") and any(own.get(k, ()))}
    return {k: (*summary(v), len(v)) for k, v in found.items()} | {"recovered": shares}


def table_of(records, teacher=True):
    """Rows, the first of names: a line a metric of so many items; records: {name: "held", "tasks"}; teacher: first."""
    rows, held, tasks = [["", *records]], *([r[k] or {} for r in records.values()] for k in ("held", "tasks"))
    own = {"ce": next((show(h["teacher_ce"]) for h in held if "teacher_ce" in h), ""), "kl": "0", "agreement": "1"}
    for field, title in (MEASURES | {"ce": "held-out CE (nats)", "kl": "KL to the teacher"}).items():
        if any(field in h for h in held):
            cells = [show(h[field]) if field in h else "" for h in held]
            rows.append([title, *([own.get(field, ""), *cells[1:]] if teacher else cells)])
    scores = ((t, k, v) for found in tasks for t, row in found.items() for k, v in row.items())
    for task, metric, *items in dict.fromkeys((t, k, *v[2:]) for t, k, v in scores if isinstance(v, tuple | list)):
        cells = [cell(found.get(task, {}), metric, items) for found in tasks]
        rows.append([f"{task} {metric} ({items[0] if items else 'lm-eval'})", *cells])
    return rows


def cell(row, metric, items):
    """'0.540 ± 0.022  83% [77%, 88%]': the score on so many items, the share recovered, and what is to be known."""
    if list(row.get(metric, [None] * 3)[2:]) != items:
        return ""
    share = row.get("recovered", {}).get(metric)
    over = f"  ({row['beyond']} beyond the context)" if row.get("beyond") else ""
    return show(row[metric]) + ("  {:.0%} [{:.0%}, {:.0%}]".format(*share) if share else "") + over


def as_text(rows, markdown=False):
    """Rows in columns, or as a table of Markdown."""
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
    widths = [max(map(len, column)) for column in zip(*rows)]
    aligned = lambda row: [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))]
    return "\n".join("  ".join(aligned(row)) for row in rows)


def scoreboard(held):
    """The table of one student on held-out text; held: `heldout`'s."""
    teacher = {"teacher": {"held": None, "tasks": {}}} if "kl" in held else {}
    return as_text(table_of(teacher | {"student": {"held": held, "tasks": {}}}, bool(teacher)))


def report(kept, teacher=True, markdown=False):
    """The table, and a line a comparison, of what evaluation.json keeps."""
    words = "{task}: right in {models[0]} alone {alone[0]}, in {models[1]} alone {alone[1]}, p = {p:.2g}"
    lines = [as_text(table_of(kept["models"], teacher), markdown), *(words.format(**row) for row in kept["mcnemar"])]
    return ("\n\n" if markdown else "\n").join(lines)


def compared(models):
    """Each pair of models on each task's items, by McNemar's test -> rows of evaluation.json."""
    rows = []
    for task, two in itertools.product(sorted(models[0]["tasks"]), itertools.combinations(models, 2)):
        *alone, p = mcnemar(*(m["tasks"][task].get("acc", []) for m in two))
        rows += [{"task": task, "models": [m["name"] for m in two], "alone": alone, "p": p}] if any(alone) else []
    return rows


def groups(questions, values):
    """Accuracy by subject or relation -> {metric: values by item}, worst first."""
    by = {}
    for q, value in zip(questions, values):
        by.setdefault(f"acc of {q.group}", []).append(value)
    return dict(sorted(by.items(), key=lambda row: sum(row[1]) / len(row[1])))


@contextlib.contextmanager
def figure(path, *shape, **how):
    """Axes to draw on, saved in path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(*shape, **how)
    yield axes
    fig.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(fig)


def draw_scores(path, models):
    """Bars: accuracies by task, a colour a model, with standard errors."""
    names = [task for task, found in models[0]["tasks"].items() if "acc" in found and "@" not in task]
    with figure(path, figsize=(max(5, 1.4 * len(names)), 4)) as ax:
        for i, m in enumerate(models):
            values, errors = zip(*(summary(m["tasks"][task]["acc"]) for task in names))
            places = np.arange(len(names)) + (i - (len(models) - 1) / 2) * 0.8 / len(models)
            ax.bar(places, values, 0.8 / len(models), yerr=errors, label=m["name"])
        ax.set(xticks=range(len(names)), ylabel="accuracy")
        ax.set_xticklabels(names, rotation=20)
        ax.legend()


def draw_needles(path, models):
    """A panel a level: which model finds the needle, by context and, where there are several, needles in it."""
    names = [task for task in models[0]["tasks"] if "@" in task]
    levels = sorted({name[:6] for name in names})
    size = (2 + 0.6 * len(names), 1.5 + 0.4 * len(models))
    with figure(path, 1, len(levels), figsize=size, squeeze=False, layout="constrained") as panels:
        for ax, level in zip(panels[0], levels):
            mine = [name for name in names if name.startswith(level)]
            found = np.array([[summary(m["tasks"][name]["acc"])[0] for name in mine] for m in models])
            ax.imshow(found, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
            for (i, j), value in np.ndenumerate(found):
                ax.text(j, i, f"{value:.2f}".replace("0.", "."), ha="center", va="center", fontsize=7)
            keys = [name[7:].replace("@", " in\n") if ":" in name else name.split("@")[1] for name in mine]
            ax.set_xticks(range(len(mine)), keys, fontsize=7)
            ax.set_yticks(range(len(models)), [Path(m["name"]).name for m in models], fontsize=7)
            ax.set(title=level, xlabel="needles in tokens" if ":" in mine[0] else "tokens")


# ------------------------------------------------------------------ decoding


def after(model, T, new):
    """The state after T tokens, made up: its size and the work on it are those of a real one."""
    state = model.trunk(torch.zeros(1, 1, dtype=torch.long, device=model.embed.weight.device))[1]
    for block, old in zip(model.blocks, state):
        if block.mixer.decay == "softmax":
            old |= {name: old[name].expand(-1, T, -1, -1).clone() for name in "kv"}
            old["at"] = torch.arange(T, device=old["at"].device)[None]
        old["position"] = torch.full_like(old["position"], min(T, model.config.context - new))
    return state


def decode(model, state, new):
    """`new` greedy tokens after a state."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.embed.weight.device)
    for _ in range(new):
        h, state = model.trunk(token, state)
        model.head(h[:, -1]).argmax(-1).item()


def decoding(models, T, new, repeats):
    """print_decoding's rows of one length: the models are timed in turn, so their states are there at once."""
    states = {name: (model, after(model, T, new)) for name, model in models}
    seconds = medians({name: functools.partial(decode, *pair, new) for name, pair in states.items()}, repeats)
    floats = lambda state: [z for layer in state for z in layer.values() if z.is_floating_point()]
    size = {name: sum(z.numel() * z.element_size() for z in floats(state)) for name, (_, state) in states.items()}
    return [[name, T, new / seconds[name], size[name]] for name in states]


@torch.no_grad()
def print_decoding(models, lengths, new=16, repeats=5):
    """Tokens a second and bytes of state against context, for [(name, model)]; -> rows [name, T, tokens/s, bytes]."""
    rows = [row for T in lengths for row in decoding(models, T, new, repeats)]
    print_lines("tokens a second, MiB of state", rows, lambda speed, size: f"{speed:.1f} {size / 2**20:8.1f}")
    return rows


@torch.no_grad()
def print_ranks(models, text, lengths):
    """How much of its state a model uses: [(name, model, tokenizer)] on a text -> rows [name, T, effective rank].

    exp of the entropy of the singular values over their sum (Roy and Vetterli 2007), mean over heads and layers that
    are linear; it is between 1 and min(K, V).
    """
    rows = []
    for name, model, tokenizer in models:
        ids, state, before = torch.tensor([tokenizer.encode(text)]).to(model.embed.weight.device), None, 0
        for T in sorted(n for n in lengths if n <= ids.size(1)):
            for part in ids[:, before:T].split(512, 1):
                state = model.trunk(part, state)[1]
            values = [torch.linalg.svdvals(layer["S"].double()) for layer in state if "S" in layer]
            shares = [s / s.sum(-1, keepdim=True).clamp(min=1e-30) for s in values]
            ranks = [torch.special.entr(p).sum(-1).exp().mean().item() for p in shares]
            rows.append([name, T, sum(ranks) / max(len(ranks), 1)])
            before = T
    print_lines("effective rank of the state", rows, "{:.1f}".format)
    return rows


def print_lines(title, rows, form):
    """Rows [name, T, *values] as a table: a line a T, a column a name, form(*values) in it."""
    names, cells = dict.fromkeys(row[0] for row in rows), {(name, T): form(*values) for name, T, *values in rows}
    lines = [[str(T), *(cells.get((name, T), "") for name in names)] for T in sorted({row[1] for row in rows})]
    print(f"\n{title}\n{as_text([['tokens', *names], *lines])}")


def draw_lines(path, rows, panels):
    """Rows [name, T, *values] against T, a line a name; panels: of each value what it is, its unit and its scale."""
    with figure(path, 1, len(panels), figsize=(4.5 * len(panels), 3.5), squeeze=False) as axes:
        for name in dict.fromkeys(row[0] for row in rows):
            T, *values = zip(*(row[1:] for row in rows if row[0] == name))
            for ax, ys, (words, unit, scale) in zip(axes[0], values, panels):
                ax.plot(T, [y / unit for y in ys], "o-", markersize=3, label=name)
                ax.set(xlabel="tokens before", ylabel=words, xscale="log", yscale=scale)
        axes[0][0].legend(fontsize=7)


# ------------------------------------------------------------------ lm-eval


class Harness:
    """A model as lm-eval's `simple_evaluate` takes it (pip install lm-eval), so that its tasks run by name."""

    def __init__(self, model, tokenizer):
        from lm_eval.api.model import LM

        LM.register(Harness)
        self.model, self.tokenizer, self.rank, self.world_size = model, tokenizer, 0, 1
        self.task_dict, self.tokenizer_name, self.beyond = {}, "nanolinear", set()

    def set_cache_hook(self, hook):
        """lm-eval's own cache is not used: `simple_evaluate` calls this."""

    def answers(self, requests, questions, chunk=None):
        """What is answered; the items that go beyond the context are told and kept, as (task, number)."""
        found = answers(self.model, self.tokenizer, questions, chunk=chunk, title="lm-eval")
        beyond("lm-eval", found, self.model.config)
        self.beyond |= {(r.task_name, r.doc_id) for r, row in zip(requests, found) if row["beyond"]}
        return found

    def loglikelihood(self, requests, **_):
        found = self.answers(requests, [Exact([r.args]) for r in requests])
        return [(row["ll"][0], row["greedy"]) for row in found]

    def loglikelihood_rolling(self, requests, **_):
        pages = [windows_of(self.tokenizer, r.args[0], self.model.config.context) for r in requests]
        return [sum(ll for ll, _ in likelihoods(self.model, page)) for page in tqdm(pages, desc="lm-eval")]

    def generate_until(self, requests, **_):
        asked = []
        for context, how in (r.args for r in requests):
            until = how.get("until") or ()
            until = (until,) if isinstance(until, str) else tuple(until)
            asked.append(Written(context, "", how.get("max_gen_toks", 256), until))
        return [row["text"] for row in self.answers(requests, asked, chunk=1)]


def with_lm_eval(model, tokenizer, names, limit, shots):
    """Scores of lm-eval's tasks by name -> {task: {metric,filter: (value, standard error)}}."""
    import lm_eval

    how, harness = dict(tasks=names, limit=limit or None, num_fewshot=shots), Harness(model, tokenizer)
    try:
        with tempfile.TemporaryDirectory() as folder:  # RULER and BABILong size their texts by a tokenizer's name
            save_tokenizer(tokenizer, folder)
            found = lm_eval.simple_evaluate(harness, metadata={"tokenizer": folder}, **how)["results"]
    except ImportError as error:
        lacks = getattr(error.__cause__ or error, "name", None) or "what it names"
        raise BadInput(f"--tasks {','.join(names)}: pip install {lacks}; lm-eval says: {error}") from error
    scores, over = {}, collections.Counter(task for task, _ in harness.beyond)
    for task, row in found.items():
        row = {key: x for key, x in row.items() if isinstance(x, float)}
        pairs = {key: (x, row.get(key.replace(",", "_stderr,"), math.nan)) for key, x in row.items()}
        scores[task] = {key.removesuffix(",none"): pair for key, pair in pairs.items() if "_stderr" not in key}
        scores[task] |= {"beyond": over[task]} if over[task] else {}
    return scores


# ------------------------------------------------------------------ the mixers, side by side


def mixing(mixer, T):
    """FLOPs of a token beside the weights: 4 to 9 a number of S; of softmax after T tokens 4 a number of T keys."""
    state = mixer(mixer.q.weight.new_zeros(1, 1, mixer.width))[1]
    each = 4 + (mixer.decay in ("head", "channel")) + {"delta": 2, "own key": 4}.get(mixer.write, 0)
    return each * (state["S"].numel() if "S" in state else T * mixer.heads * mixer.head_dim)


@torch.no_grad()
def print_mixers(T=2048):
    """Print what each mixer adds to attention's weights, its state, a token's cost, and how far its forms differ."""
    config = Config(**SHAPE)
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
        moved = 2 * weights + (4 if name == "softmax" else 8) * state
        work = 2 * weights + mixing(mixer, T)
        row = f"{name:<12}{cls.decay:<9}{cls.write:<9}{new:>9,}{state:>9,}{work / 1e6:>7.2f}"
        source = re.search(r"arXiv ([\d.]+\d)|$", cls.__doc__ or "")[1] or ""
        print(f"{row}{moved / 1e6:>7.2f}{(loop - fast).abs().max():>8.0e}  {source}")


SENTENCE = "The cat sat on the mat, and the dog sat on the rug. When the cat saw the dog, the cat left the mat."


@torch.no_grad()
def draw_mixers(path, teacher_name, columns=5):
    """One row a mixer at its start, the teacher's attention first: what some heads mix, each row of T over its largest.

    Red adds, blue takes away; the root of the value is drawn, so that small weights show.
    """
    teacher, tokenizer = load_teacher(teacher_name)
    inputs = [x for _, x, *_ in layers(teacher, teacher, torch.tensor([tokenizer.encode(SENTENCE)]))]
    places = [(len(inputs) * (2 * i + 1) // (2 * columns), 2 * i % teacher.config.heads) for i in range(columns)]
    size = (2 * columns, 2 * len(MIXERS))
    with figure(path, len(MIXERS), columns, figsize=size, squeeze=False) as axes:
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


# ------------------------------------------------------------------ a sweep's runs, side by side

MACHINE = {"out", "resume", "save_every", "micro_batch", "recompute", "dry_run", "report", "device", "commit", "torch"}
MACHINE |= {"shard", "python", "threads", "date", "text", "source"}  # what of args.json is no choice between runs
SIZES = {"teacher", "size"}  # these stand for the number of parameters


def report_runs(folder):
    """results.jsonl, .md and .png of a folder of runs, from their files, or from results.jsonl where they are gone."""
    rows, unfinished = collect(folder)
    if unfinished:
        print(f"not finished, so not in the table: {', '.join(unfinished)}")
    if not rows:
        raise BadInput(f"--report {folder}: no finished run in it, and no results.jsonl")
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = grouped(rows)
    told = any(g["lr"] for g in groups)  # else every run had its recipe's
    table = [[*groups[0]["key"], *["lr"] * told, "seeds", *(MEASURES[m] for m in groups[0]["found"])]]
    for g in groups:
        cells = [show(mean_and_sd(v)) for v in g["found"].values()]
        lr = [f"{g['lr']:g}" if g["lr"] else ""] * told
        table.append([*map(str, g["key"].values()), *lr, str(len(g["rows"])), *cells])
    tried = any(g["rates"] > 1 for g in groups)
    chosen = "; lr: of those tried, the one that was best on the validation windows" if tried else ""
    lines = [f"mean ± standard deviation over seeds{chosen}", *laws(groups)]
    print("\n" + as_text(table), *lines, sep="\n")
    (folder / "results.md").write_text("\n\n".join([as_text(table, markdown=True), *lines]) + "\n", encoding="utf-8")
    draw_runs(folder / "results.png", groups)
    print(f"written: {folder}/results.jsonl, .md and .png")


def collect(folder):
    """-> (a row per finished run: its name, args, scores and validations, names of others), by name."""
    unfinished, file = [], folder / "results.jsonl"
    with reading(file, "delete it, if the runs are there"):
        lines = file.read_text().splitlines() if file.exists() else ()
        rows = {row["run"]: row for row in map(json.loads, lines)}
    for args in sorted(folder.glob("*/args.json")):
        run = args.parent
        if not (run / "scores.json").exists():
            unfinished.append(run.name)
            continue
        with reading(run, "delete this run, and give the sweep's command again"):
            told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            found = [[r["step"], r["value"]] for r in told if "value" in r]
            about = {"args": read_json(args), "scores": read_json(run / "scores.json"), "held": found}
            rows[run.name] = {"run": run.name} | about
    return [rows[name] for name in sorted(rows)], unfinished


def grouped(rows):
    """-> [{"key": {what differs but for seed and lr: its value}, "lr", "rates", "rows", "found": {measure: values}}].

    A group's rows are its seeds at the rate whose last validations are best.
    """
    args = [{k: v for k, v in row["args"].items() if k not in MACHINE} for row in rows]
    differing = [n for n in args[0] if n not in ("seed", "lr") and len({str(a.get(n)) for a in args}) > 1]
    axes, every, by, groups = differing or ["mixer"], [measured(row["scores"]) for row in rows], {}, []
    shared = [name for name in MEASURES if all(name in found for found in every)]
    for row in rows:
        key = tuple(as_word(row["args"].get(name)) for name in axes)
        by.setdefault(key, {}).setdefault(row["args"]["lr"], []).append(row)
    for key, rates in by.items():
        lr = min(rates, key=lambda lr: np.mean([row["held"][-1][1] for row in rates[lr]]))
        found = {name: [measured(row["scores"])[name] for row in rates[lr]] for name in shared}
        groups.append({"key": dict(zip(axes, key)), "lr": lr, "rates": len(rates), "rows": rates[lr], "found": found})
    parameters = lambda g: g["rows"][0]["scores"].get("parameters", 0)
    place = lambda g, name, x: (False, parameters(g)) if name in SIZES else (isinstance(x, str), x)
    return sorted(groups, key=lambda g: [place(g, *pair) for pair in g["key"].items()])


def measured(scores):
    """Which of MEASURES a scores.json has, as numbers."""
    found = {name: scores[name][0] for name in MEASURES if name in scores}
    return found | ({"gap": found["ce"] - scores["teacher_ce"][0]} if "teacher_ce" in scores else {})


def as_word(value):
    """A flag's value in a table: the last part of a path, a list joined; a number stays one."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value if isinstance(value, (int, float)) else Path(str(value or "")).name


def laws(groups):
    """Lines: for each line of the figure, loss = E + A · x^−α, or why not; x the tokens, and the parameters."""
    lines, measures = [], [name for name in ("ce", "gap") if name in groups[0]["found"]]
    for axis, letter in (("tokens", "D"), ("parameters", "N")):
        for names, line in lines_of(groups, axis).items():
            x = np.array([value for value, g in line for _ in g["rows"]], float)
            for measure in measures if len(line) > 1 else ():
                y = np.array([value for _, g in line for value in g["found"][measure]])
                name = " ".join(filter(None, names)) or "all"
                lines.append(f"{name}: {MEASURES[measure]}({letter}) {law(x, y, letter)}")
    return lines


def law(x, y, letter):
    """A fit in words, or why there is none."""
    if len(set(x)) < 4:
        return f"not fitted: {len(set(x))} different {letter} are too few for three numbers; give 4 or more"
    E, A, alpha, low, high = fit_law(x, y)
    if A <= 0:
        return f"does not fall with {letter}"
    if low < 0.011 and high > 3.9:  # all that were tried
        return f"has no exponent in {letter} that fits better than another"
    return f"= {E:.3g} + {A:.3g} · {letter}^−{alpha:.2f}, exponent between {low:.2f} and {high:.2f} (95%)"


def power_law(x, y):
    """Least squares of E + A x^−α with E, A ≥ 0: x (n,), y (fits, n) -> E, A, α, each (fits,). α by a grid of 1.5%."""
    unit, best = math.exp(np.log(x).mean()), np.full((4, len(y)), np.inf)
    for alpha in np.geomspace(0.01, 4, 400):
        power = (x / unit) ** -alpha
        centred = power - power.mean()
        A = np.maximum(y @ centred / (centred @ centred), 0)
        E = y.mean(1) - A * power.mean()
        A = np.where(E < 0, y @ power / (power @ power), A)
        E = np.maximum(E, 0)
        errors = ((y - E[:, None] - A[:, None] * power) ** 2).sum(1)
        found = np.stack([errors, E, A * unit**alpha, np.full(len(y), alpha)])
        best = np.where(errors < best[0], found, best)
    return best[1:]


def fit_law(x, y, draws=1000, seed=0):
    """x, y (n,) -> (E, A, α, and the 95% interval of α by drawing residuals, which seeds and points both have)."""
    E, A, alpha = (z[0] for z in power_law(x, y[None]))
    fitted = E + A * x**-alpha
    left = (y - fitted) * math.sqrt(len(x) / max(len(x) - 3, 1))  # three numbers were fitted to them
    drawn = fitted + np.random.default_rng(seed).choice(left - left.mean(), (draws, len(x)))
    return E, A, alpha, *np.quantile(power_law(x, drawn)[2], [0.025, 0.975])


def lines_of(groups, axis):
    """{(mixer, what else differs): [(x, group)] by x}; axis: "tokens", or "parameters" (of teachers or sizes)."""
    gone, found = {"tokens"} if axis == "tokens" else SIZES, {}
    for g in groups if gone & set(groups[0]["key"]) else ():
        told = {name: value for name, value in g["key"].items() if name not in gone}
        mixer = str(told.pop("mixer", ""))
        rest = " ".join(f"{value:,} tokens" if name == "tokens" else str(value) for name, value in told.items())
        x = g["rows"][0]["args"]["tokens"] if axis == "tokens" else g["rows"][0]["scores"]["parameters"]
        found.setdefault((mixer, rest), []).append((x, g))
    return {name: sorted(line, key=lambda point: point[0]) for name, line in found.items()}


def draw_runs(path, groups):
    """A row a measure. Against tokens, else parameters: a line a mixer, a column what else differs; else points."""
    axis = "tokens" if "tokens" in groups[0]["key"] else "parameters" if SIZES & set(groups[0]["key"]) else ""
    lines, measures = lines_of(groups, axis), [m for m in ("ce", "kl", "answers") if m in groups[0]["found"]]
    columns = list(dict.fromkeys(rest for _, rest in lines)) or [""]
    size = (1 + 4 * len(columns), (3.2 if axis else 1 + 0.25 * len(groups)) * len(measures))
    with figure(path, len(measures), len(columns), figsize=size, squeeze=False, layout="constrained") as panels:
        for (measure, rest), ax in zip(itertools.product(measures, columns), panels.flat):
            spread = lambda gs, m=measure: np.nan_to_num([mean_and_sd(g["found"][m]) for g in gs]).T
            for (mixer, other), line in lines.items():
                if other == rest:
                    x, gs = zip(*line)
                    ax.errorbar(x, *spread(gs), marker="o", markersize=3, capsize=2, label=mixer)
            if axis:
                ax.set(xscale="log", xlabel=axis, ylabel=MEASURES[measure], title=rest)
            else:
                y, error = spread(groups)
                ax.errorbar(y, range(len(y)), xerr=error, fmt="o")
                ax.set_yticks(range(len(y)), [" ".join(map(str, g["key"].values())) for g in groups])
                ax.set_xlabel(MEASURES[measure])
        if len(lines) > 1:
            panels[0][0].legend(fontsize=7)


# ------------------------------------------------------------------ python evaluate.py


def parser():
    """Every flag."""
    p = Parser(description="Score runs and teachers beside each other.", allow_abbrev=False)
    p.add_argument("models", nargs="+", help="run folders, or anything --teacher of train.py takes")
    p.add_argument("--tasks", default="", help=f"comma list of {KNOWN}, and lm-eval's own (default: none)")
    p.add_argument("--limit", type=int, default=0, help="only N items of a task (default 0: all; a needle task: 100)")
    p.add_argument("--shots", type=int, help="examples shown first (default 0; mmlu_letters and gsm8k 5)")
    p.add_argument("--lengths", default="", help="contexts of needles (512,1024,2048), --decode (512 to 65536), --rank")
    p.add_argument("--haystack", help="text to hide needles in: file, folder or hub name (default: docstrings)")
    p.add_argument("--data-dir", help="folder with the tasks' files (default: the hub)")
    p.add_argument("--baseline", help="teacher to stand beside them (default: the runs' own; none: nobody)")
    p.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"], help="matmuls (default auto)")
    p.add_argument("--decode", action="store_true", help="measure tokens a second and state against context")
    p.add_argument("--rank", action="store_true", help="measure how much of its state a model uses, by tokens read")
    p.add_argument("--groups", action="store_true", help="also accuracy by subject (mmlu) or relation (bear)")
    p.add_argument("--prompt", help="also continue this text, greedily")
    p.add_argument("--chat", action="store_true", help="the prompt is a user's turn, in the model's chat template")
    p.add_argument("--out", help="folder for evaluation.json, .md and .png (default: a single run's own)")
    return p


def read_flags():
    """-> flags; tasks: names, of needles one for each context (niah_1@512); harness: lm-eval's; lengths: numbers."""
    args = parser().parse_args()
    if args.limit < 0 or (args.shots or 0) < 0:
        raise BadInput(f"--limit {args.limit} --shots {args.shots}: wanted 0 (all items, no examples) or more")
    lengths = [int(n) if n.strip().isdecimal() else 0 for n in args.lengths.split(",") if n]
    if 0 in lengths:
        raise BadInput(f"--lengths {args.lengths!r}: wanted numbers of tokens, 1 or more, as 512,4096")
    if args.chat and not args.prompt:
        raise BadInput("--chat: give --prompt TEXT too, the user's turn")
    if "none" in args.models:
        raise BadInput("models 'none': wanted runs or teachers; --baseline none leaves the teacher out")
    names = [task.strip() for task in args.tasks.split(",")]
    if args.tasks and not any(names):
        raise BadInput(f"--tasks {args.tasks!r}: no task in it; there are {KNOWN}")
    ours, theirs = [], []
    for task in filter(None, names):
        name, colon, keys = task.partition(":")
        if name in NIAH:
            if colon and not (keys.isdecimal() and 0 < int(keys) <= len(KEYS)):
                raise BadInput(f"--tasks {task}: wanted a number of needles after the colon, as niah_1:8")
            ours += [f"{task}@{n}" for n in lengths or (512, 1024, 2048)]
        else:
            (ours if task in TASKS else theirs).append(task)
    if args.shots and not theirs and not any(task in TASKS and TASKS[task].shown for task in ours):
        raise BadInput(f"--shots {args.shots}: {args.tasks or 'held-out text'} has no examples to show; leave it out")
    if theirs:
        check_names(theirs)
    args.tasks, args.harness, args.lengths = ours, theirs, lengths
    return args


def check_names(names):
    """BadInput for the first that lm-eval does not know either."""
    try:
        from lm_eval.tasks import TaskManager

        known, rest = TaskManager().match_tasks, ", and none of lm-eval is called so"
    except ImportError:
        known, rest = lambda names: [], "; with pip install lm-eval also its tasks"
    for name in names:
        if not known([name]):
            near = (difflib.get_close_matches(name, [*TASKS, *NIAH], 1) or list(TASKS))[0]
            raise BadInput(f"task {name!r} is not known; did you mean {near!r}? There are {KNOWN}{rest}")


def mark(model, tokenizer):
    """What a model's answers are kept under: its weights, shape, precision and ids."""
    parts = [p.detach().flatten()[:64].float().cpu().numpy().tobytes() for p in model.parameters()]
    about = f"{model.config}{tokenizer.bos}{tokenizer.eos}{tokenizer.vocab}{model.embed.weight.dtype}".encode()
    return hashlib.sha1(about + b"".join(parts)).hexdigest()[:12]


def score(name, model, tokenizer, teacher, own, args):
    """All scores of one model: {"name", "tasks": by item, "kept"}; own: its teacher's by item."""
    is_run, file, held = (Path(name) / "args.json").exists(), Path(name) / "heldout.safetensors", None
    folder, found, kept = (Path(name) if is_run else CACHE) / "answers" / mark(model, tokenizer), {}, {}
    if is_run and file.exists():
        with reading(file, "delete it to score tasks alone"):
            held = heldout(model, teacher, load_file(file)["tokens"].long().to(model.embed.weight.device))
    elif is_run:
        print(f"{name}: no heldout.safetensors in it, so no held-out text is scored")
    for task in args.tasks:
        needle, _, length = task.partition("@")
        if length:
            level, keys = int(needle[5]), int(needle.partition(":")[2] or 1)
            text = haystack(args.haystack) if level > 1 else ""
            questions = needles(level, int(length), tokenizer, text, args.limit or 100, keys=keys)
        else:
            questions = questions_of(task, args.data_dir, args.limit, args.shots)
        file, words = folder / f"{task}.answers", f"{Path(name).name} {task}"
        answered = answers(model, tokenizer, questions, file, title=words)
        found[task] = metrics(questions, answered)
        if args.groups and getattr(questions[0], "group", ""):
            found[task] |= groups(questions, found[task]["acc"])
        over = {"beyond": beyond(f"{name}, {task}", answered, model.config)}
        kept[task] = record(found[task], own.get(task, {})) | over | args.how
    kept |= with_lm_eval(model, tokenizer, args.harness, args.limit, args.shots) if args.harness else {}
    return {"name": name, "tasks": found, "kept": {"held": held, "tasks": kept}}


def teacher_of(told):
    """The one teacher of all runs, by their args.json; "none" if they have none."""
    teachers = dict.fromkeys(t["teacher"] for t in told if t.get("teacher") not in (None, "none"))
    if len(teachers) > 1:
        words = "different teachers; score them in separate calls, or give --baseline"
        raise BadInput(f"runs of {' and '.join(teachers)}: {words}")
    return next(iter(teachers), "none")


def main():
    """Score models, their teacher beside them; in a run, or in --out, write the scores."""
    args = read_flags()
    told = [read_json(Path(m) / "args.json") if (Path(m) / "args.json").exists() else {} for m in args.models]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, why = precision(device, args.precision)
    print(f"precision: {str(dtype).removeprefix('torch.')} matmuls, {why}")
    baseline = args.baseline or teacher_of(told)
    args.how = {"precision": str(dtype), "limit": args.limit, "shots": args.shots, "baseline": baseline}
    target = Path(args.out) if args.out else Path(args.models[0]) if told[0] and len(args.models) == 1 else None
    saved = earlier(target)  # before the work, so that what cannot be written is known
    opens, models, teacher = [], [], None
    names = list(dict.fromkeys(name for name in (baseline, *args.models) if name != "none"))
    short = collections.Counter(Path(name).name for name in names)
    with autocast(device, dtype):
        for name in names:
            model, tokenizer = load_teacher(name, dtype=dtype, device=device)
            if args.chat and name in args.models and not tokenizer.chat:
                raise BadInput(f"--chat: {name} has no chat template, it was not tuned on chats; leave --chat out")
            if teacher and teacher.config.vocab != model.config.vocab:
                ids = f"it has {teacher.config.vocab} ids, {name} {model.config.vocab}"
                raise BadInput(f"--baseline {baseline}: {ids}; give the model's own teacher")
            own = models[0]["tasks"] if models and baseline != "none" else {}
            models.append(score(name, model, tokenizer, teacher, own, args))
            if args.prompt and name in args.models:
                stream(model, tokenizer, args.prompt, 60, chat=args.chat)
            teacher = model if name == baseline else teacher
            if args.decode or args.rank:
                opens.append((Path(name).name if short[Path(name).name] == 1 else name, model, tokenizer))
            del model  # its memory too, before the next is loaded
        kept = {"models": {m["name"]: m["kept"] for m in models}, "mcnemar": compared(models)}
        print("\n" + report(kept, baseline != "none"))
        if target:
            write(target, saved, kept, models, baseline != "none")
        against_context(opens, args, target)


def against_context(models, args, target):
    """--decode and --rank of models [(name, model, tokenizer)]: told, and kept in `target`."""
    if args.decode:
        rows = print_decoding([model[:2] for model in models], args.lengths or (512, 2048, 8192, 32768, 65536))
        keep(target, "decoding", rows, [("tokens a second", 1, "log"), ("MiB of state", 2**20, "log")])
    if args.rank:
        linear = [model for model in models if set(model[1].config.mixers) != {"softmax"}]
        if not linear:
            raise BadInput("--rank: softmax alone has no state of fixed size; give a student")
        rows = print_ranks(linear, haystack(args.haystack), args.lengths or [2**n for n in range(4, 13)])
        keep(target, "ranks", rows, [("effective rank of the state", 1, "linear")])


def keep(target, name, rows, panels):
    """Rows as data and as a figure, if there is a folder for them."""
    if target:
        (target / f"{name}.json").write_text(json.dumps(rows))
        draw_lines(target / f"{name}.png", rows, panels)


def earlier(target):
    """The folder for the scores made, and what is in its evaluation.json."""
    kept = {"models": {}, "mcnemar": []}
    if target is None:
        return kept
    if target.exists() and not target.is_dir():
        raise BadInput(f"--out {target}: a file of that name exists; give a folder")
    target.mkdir(parents=True, exist_ok=True)
    file = target / "evaluation.json"
    with reading(file, "delete it, or give another --out"):
        kept |= read_json(file) if file.exists() else {}
        report(kept)
    return kept


def write(target, saved, kept, models, teacher):
    """evaluation.json and .md (what was scored before and not again stays, after this call's), evaluation.png."""
    file, temporary = target / "evaluation.json", target / "evaluation.json.tmp"
    again = {(m["name"], task) for m in models for task in m["tasks"]}
    for name, row in kept["models"].items():
        row["tasks"] = saved["models"].pop(name, {"tasks": {}})["tasks"] | row["tasks"]
    kept["models"] |= saved["models"]
    kept["mcnemar"] += [row for row in saved["mcnemar"] if not again & {(name, row["task"]) for name in row["models"]}]
    temporary.write_text(json.dumps(kept, indent=1))
    temporary.replace(file)
    (target / "evaluation.md").write_text(report(kept, teacher, markdown=True) + "\n", encoding="utf-8")
    if any("acc" in found and "@" not in task for task, found in models[0]["tasks"].items()):
        draw_scores(target / "evaluation.png", models)
    if any("@" in task for task in models[0]["tasks"]):
        draw_needles(target / "needles.png", models)
    print(f"written: {target}/evaluation.json, .md and figures")


if __name__ == "__main__":
    cli(main)
