"""Scores: how much of the teacher a student kept, each figure with its standard error and the teacher's beside it.

    python evaluate.py RUN                                          held-out text of the run: CE, KL, agreement
    python evaluate.py RUN OTHER_RUN --tasks lambada,piqa,arc_easy  items from the hub, the models compared in pairs
    python evaluate.py 140m --tasks lambada --data-dir FOLDER       a teacher alone, items from local files
    python evaluate.py RUN --decode                                 tokens a second and state against context

A task is a row of TASKS: where its items are and how one becomes a Question. What a model answers is kept item by
item, so that a stopped scoring goes on and two models are compared on the same items. `python mixers.py` has its table
and its picture from here, and train.py the text it reads. Nothing here trains.
"""

import csv
import difflib
import io
import json
import math
import random
import re
import time
import typing
import uuid
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from distill import layers, reach, unmark
from mixers import MIXERS, build
from surgery import CACHE, BadInput, Parser, cli, is_hub_name, load_teacher, read_json, reading, transplant

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


# ------------------------------------------------------------------ text


def documents(source):
    """Yield texts or chats: of a file, of a folder's readable files, of a hub set, or of installed documentation."""
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
    """The texts of one file, or its chats: rows' 'text' or 'messages', or parts between lines <|endoftext|>."""
    with reading(f"--data {path}", "give UTF-8 text, or rows with a field 'text' or 'messages'"):
        if path.suffix == ".parquet":
            import pyarrow.parquet

            file = pyarrow.parquet.ParquetFile(path)
            column = "messages" if "messages" in file.schema_arrow.names else "text"
            found = (row for part in file.iter_batches(columns=[column]) for row in part[column].to_pylist())
        elif path.suffix == ".jsonl":
            found = (row_of(json.loads(line)) for line in path.open(encoding="utf-8") if line.strip())
        else:
            found = (part for part in path.read_text(encoding="utf-8-sig").split("\n<|endoftext|>\n") if part.strip())
        yield from found


def row_of(row):
    """The text or the chat of a row."""
    return row["messages"] if "messages" in row else row["text"]


def hub_texts(name):
    """The 'text' or the 'messages' of each row of a hub data set, streamed."""
    from datasets import load_dataset

    with reading(f"--data {name}", "check the network and the name on the hub, or give a local file"):
        for row in load_dataset(name, split="train", streaming=True):
            yield row_of(row)


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
def heldout(student, teacher, tokens, batch=4):
    """tokens (n, T) -> {"ce", "teacher_ce", "kl", "agreement"}: (mean, standard error over the n sequences).

    In nats per token; agreement: the share of positions where both put the same token first. No teacher: no more than
    "ce". Where only some tokens are learned, "answers" is the share of these that the student puts first.
    """
    tokens, learn = unmark(tokens)
    rows = {"ce": []} | ({"teacher_ce": [], "kl": [], "agreement": []} if teacher else {})
    rows |= {} if learn is None else {"answers": []}
    for at, x in zip(range(0, len(tokens), batch), tokens.split(batch)):
        ours, theirs = (model and model.trunk(x)[0] for model in (student, teacher))
        for i, ids in enumerate(x):  # one sequence at a time: T × vocabulary floats
            log_p = F.log_softmax(student.head(ours[i, :-1]).float(), -1)
            rows["ce"].append(F.nll_loss(log_p, ids[1:]).item())
            if learn is not None and (asked := learn[at + i, 1:]).any():
                rows["answers"].append((log_p.argmax(-1) == ids[1:])[asked].double().mean().item())
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


class Question(typing.NamedTuple):
    """One item. choose: pairs and answer; complete greedily: pairs of one; generate: prompt and wanted; roll: text."""

    pairs: list = ()  # [(context, continuation)]
    answer: int = None  # index of the right pair; None: the continuation must be the greedy one
    prompt: str = ""
    wanted: str = ""  # what the generated text must hold, or come to after "####"
    new: int = 0  # tokens to generate
    text: str = ""  # to be predicted whole
    size: tuple = ()  # its words and bytes, before it was prepared for the model
    group: str = ""  # subject or relation


class Task(typing.NamedTuple):
    """files: pattern under --data-dir; hub: (dataset, configuration, split); ask: (row, examples) -> Question."""

    files: str
    hub: tuple
    ask: typing.Callable
    mixed: bool = False  # --limit takes a fixed random choice, as the rows come sorted


def choose(context, choices, answer, group=""):
    return Question([(context, " " + choice) for choice in choices], answer, group=group)


def lambada(row, _):
    context, _, last = row["text"].rpartition(" ") if "text" in row else (row["context"], "", row["continuation"])
    return Question([(context, " " + last.strip())])


def hellaswag(row, _):
    def plain(text):  # WikiHow's marks
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    in_parts = "ctx_b" in row
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}" if in_parts else row["ctx"]
    return choose(
        plain(context), [plain(e) for e in row["endings"]], int(row["gold"] if "gold" in row else row["label"])
    )


def piqa(row, _):
    if "goal" in row:
        row = {"query": row["goal"], "choices": [row["sol1"], row["sol2"]], "gold": int(row["label"])}
    return ask_query(row, _)


def ask_query(row, _):
    """ARC and OpenBookQA from the hub, and what local files have as query, choices, gold."""
    question, choices, gold = (
        row.get("query") or row.get("question") or row["question_stem"],
        row["choices"],
        row.get("gold"),
    )
    if isinstance(choices, dict):
        choices, gold = choices["text"], choices["label"].index(row["answerKey"])
    question = question.removesuffix("Answer:").removeprefix("Question:").strip()
    return choose(f"Question: {question}\nAnswer:", choices, gold)


def winogrande(row, _):
    """Partial scoring: one continuation after two contexts."""
    if "sentence" in row:
        before, _, after = row["sentence"].partition("_")
        options = [before + row["option1"], before + row["option2"]]
        row = {"context_options": options, "continuation": after.strip(), "gold": int(row["answer"]) - 1}
    return Question([(context, " " + row["continuation"]) for context in row["context_options"]], row["gold"])


def mmlu(row, shots, letters=False):
    """letters: the choices are listed and the model names one; else it gives the answer's words (cloze)."""
    names = "ABCD"

    def block(r):
        listed = "".join(f"{n}. {c}\n" for n, c in zip(names, r["choices"]))
        return f"{r['question'].strip()}\n{listed}Answer:" if letters else f"Question: {r['question'].strip()}\nAnswer:"

    said = [f"{block(r)} {names[r['answer']] if letters else r['choices'][r['answer']]}\n\n" for r in shots]
    about = f"The following are multiple choice questions (with answers) about {row['subject'].replace('_', ' ')}.\n\n"
    choices = list(names[: len(row["choices"])]) if letters else row["choices"]
    return choose((about if letters else "") + "".join(said) + block(row), choices, int(row["answer"]), row["subject"])


def bear(row, _):
    """Which of the relation's answers makes the likeliest sentence (arXiv 2404.04113, first template)."""
    sentences = [row["template"].replace("[X]", row["sub_label"]).replace("[Y]", y) for y in row["answers"]]
    return Question([("", sentence) for sentence in sentences], row["answer_idx"], group=row["relation"])


def gsm8k(row, shots):
    """Five worked examples, then the number after ####, or the last number."""
    said = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in shots)
    return Question(prompt=said + f"Question: {row['question']}\nAnswer:", wanted=row["answer"], new=256)


def wikitext(row, _):
    """A page, its marks undone as lm-eval does it; words and bytes are counted in the page as it is."""
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
    return Question(text=text, size=(len(re.split(r"\s+", page)), len(page.encode())))


TASKS = {
    "lambada": Task("lambada*.jsonl", ("EleutherAI/lambada_openai", "default", "test"), lambada),
    "hellaswag": Task("hellaswag*.jsonl", ("Rowan/hellaswag", None, "validation"), hellaswag),
    "piqa": Task("piqa*.jsonl", ("baber/piqa", None, "validation"), piqa),
    "arc_easy": Task("arc_easy*.jsonl", ("allenai/ai2_arc", "ARC-Easy", "test"), ask_query),
    "arc_challenge": Task("arc_challenge*.jsonl", ("allenai/ai2_arc", "ARC-Challenge", "test"), ask_query),
    "winogrande": Task("winogrande*.jsonl", ("allenai/winogrande", "winogrande_xl", "validation"), winogrande),
    "openbookqa": Task("openbookqa*.jsonl", ("allenai/openbookqa", "main", "test"), ask_query),
    "mmlu": Task("mmlu/test/*.csv", ("cais/mmlu", "all", "test"), mmlu, True),
    "mmlu_letters": Task(
        "mmlu/test/*.csv", ("cais/mmlu", "all", "test"), lambda row, shots: mmlu(row, shots, letters=True), True
    ),
    "bear": Task("bear/P*.jsonl", ("lm-pub-quiz/BEAR", None, "test"), bear, True),
    "wikitext": Task("wiki.test.raw", ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test"), wikitext),
    "gsm8k": Task("gsm8k/test.jsonl", ("openai/gsm8k", "main", "test"), gsm8k),
}
SHOWN = {  # where the examples shown first come from, and how many there are unless --shots says otherwise
    "mmlu": ("mmlu/dev/*.csv", ("cais/mmlu", "all", "dev"), 0),
    "mmlu_letters": ("mmlu/dev/*.csv", ("cais/mmlu", "all", "dev"), 5),
    "gsm8k": ("gsm8k/train.jsonl", ("openai/gsm8k", "main", "train"), 5),
}


def rows_of(task, data_dir, files, hub):
    """The rows of a task from data_dir/**/<files>, else from the hub; BadInput says what was looked for."""
    if not data_dir:
        from datasets import load_dataset

        with reading(f"task {task!r} from the hub's {hub[0]}", f"or give --data-dir with {files} in it"):
            return list(load_dataset(hub[0], hub[1], split=hub[2]))
    found = sorted(Path(data_dir).rglob(files))
    if not found:
        raise BadInput(f"task {task!r}: no {files} under {data_dir}; without --data-dir the hub's {hub[0]} is taken")
    rows = []
    for file in found:
        with reading(file):
            rows += local_rows(file)
    return rows


def local_rows(file):
    """The rows of one file: jsonl; MMLU's csv; WikiText's raw pages; BEAR's relations and the metadata beside them."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".csv":
        subject = file.stem.removesuffix("_test").removesuffix("_dev")
        choices = lambda row: [row[f"choice{i}"] for i in range(4)]
        return [
            {"question": row["question"], "choices": choices(row), "answer": int(row["answer"]), "subject": subject}
            for row in csv.DictReader(io.StringIO(text))
        ]
    if file.suffix == ".raw":
        starts = [m.start() for m in re.finditer(r"^ = [^=]+ = \n", text, flags=re.M)] + [len(text)]
        return [{"page": text[a:b]} for a, b in zip(starts, starts[1:])]
    rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    if file.parent.name == "bear":
        about = read_json(file.parent / "metadata_relations.json")[file.stem]
        more = {"relation": file.stem, "template": about["templates"][0], "answers": about["answer_space_labels"]}
        rows = [row | more for row in rows]
    return rows


def questions_of(task, data_dir, limit=0, shots=None):
    """-> [Question]; BadInput names the item that has no labelled answer among its choices."""
    name, files, hub, ask, mixed = task, *TASKS[task]
    rows = rows_of(name, data_dir, files, hub)
    if mixed and limit:
        random.Random(0).shuffle(rows)
    rows, before = rows[: limit or None], {}
    if name in SHOWN:
        *where, usual = SHOWN[name]
        shots = usual if shots is None else shots
        for row in rows_of(name, data_dir, *where) if shots else ():
            before.setdefault(row.get("subject"), []).append(row)
    with reading(f"task {name!r}", "its items lack the fields that TASKS reads"):
        asked = [ask(row, before.get(row.get("subject"), [])[:shots]) for row in rows]
    for i, q in enumerate(asked):
        if q.pairs and q.answer is not None and q.answer not in range(len(q.pairs)):
            raise BadInput(
                f"task {name!r}: item {i} calls {q.answer!r} right among {len(q.pairs)}; take a labelled split"
            )
    if not asked:
        raise BadInput(f"task {name!r}: no items; give files that have some")
    return asked


NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KEYS = [
    f"{a}-{n}" for a in ("amber", "brave", "calm", "eager", "jolly", "noble") for n in ("anchor", "basket", "candle")
]


def needles(level, tokens, tokenizer, text, n, seed=0):
    """n Questions of RULER's needle in a haystack (arXiv 2404.06654), prompts of at most `tokens` tokens.

    level 1: the haystack repeats five sentences; 2: it is `text`; 3: and the value is a UUID. The depth is random.
    """
    kind, draw, made = "uuid" if level == 3 else "number", random.Random(f"{seed} {level} {tokens}"), []
    hay = [NOISE] if level == 1 else [s for s in re.split(r"(?<=[.!?])\s+", " ".join(text.split())) if s]
    sizes = [len(tokenizer.encode(" " + s)) for s in hay]
    for _ in range(n):
        key = draw.choice(KEYS)
        value = str(uuid.UUID(int=draw.getrandbits(128))) if level == 3 else str(draw.randint(10**6, 10**7 - 1))
        before = f"Some special magic {kind}s are hidden within the following text. Make sure to memorize it."
        before += f" I will quiz you about the {kind}s afterwards.\n"
        asked = f"\nWhat is the special magic {kind} for {key} mentioned in the provided text?"
        asked += f" The special magic {kind} for {key} mentioned in the provided text is"
        needle = f"One of the special magic {kind}s for {key} is: {value}."
        room, at, sentences = tokens - len(tokenizer.encode(before + needle + asked)) - 4, draw.randrange(len(hay)), []
        while room >= sizes[at % len(hay)]:
            sentences.append(hay[at % len(hay)])
            room, at = room - sizes[at % len(hay)], at + 1
        sentences.insert(draw.randint(0, len(sentences)), needle)
        made.append(Question(prompt=before + " ".join(sentences) + asked, wanted=value, new=48, group=str(tokens)))
    return made


# ------------------------------------------------------------------ what a model answers


def encode_pair(tokenizer, context, continuation):
    """-> (ids, where the continuation starts), cut between the two as lm-eval cuts; a first token if need be."""
    bare = context.rstrip()
    context, continuation = bare, context[len(bare) :] + continuation
    first = [] if tokenizer.bos is None else [tokenizer.bos]
    if not context:
        first = first or [tokenizer.eos]
    before = first + tokenizer.encode(context)
    whole = first + tokenizer.encode(context + continuation)
    return before + whole[len(before) :], len(before)


@torch.no_grad()
def likelihoods(model, tokenizer, pairs, *, batch=16, longest=None, device="cpu", bar=None):
    """[(context, continuation)] -> [(log-likelihood of the continuation, is it greedy, was it cut)], same order.

    A pair longer than `longest` tokens (default: the model's context) loses its beginning, and says so.
    """
    longest = min(longest or model.config.context, model.config.context)
    encoded, results = [], {}
    for context, continuation in pairs:
        ids, start = encode_pair(tokenizer, context, continuation)
        over = max(len(ids) - 1 - longest, 0)  # the last one is predicted, not read
        encoded.append((ids[over:], max(start - over, 1), over > 0))
    order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i][0]))
    while order:
        room = max(batch * 128 // len(encoded[order[0]][0]), 1)  # a batch of long ones holds fewer
        group, order = order[:room], order[room:]
        x = torch.full((len(group), len(encoded[group[0]][0]) - 1), tokenizer.eos)  # right padding: causal, never read
        for row, i in enumerate(group):
            x[row, : len(encoded[i][0]) - 1] = torch.tensor(encoded[i][0][:-1])
        h = model.trunk(x.to(device))[0]
        for row, i in enumerate(group):
            ids, start, cut = encoded[i]
            log_p = F.log_softmax(model.head(h[row, start - 1 : len(ids) - 1]).float(), -1).cpu()
            wanted = torch.tensor(ids[start:])
            greedy = bool((log_p.argmax(-1) == wanted).all())
            results[i] = (log_p.gather(-1, wanted[:, None]).sum().item(), greedy, cut)
        if bar:
            bar.update(len(group))
    return [results[i] for i in range(len(pairs))]


@torch.no_grad()
def rolling(model, tokenizer, text, *, window=2048, device="cpu"):
    """-> (log-likelihood of all of a text, its tokens): windows side by side, each token predicted once, as lm-eval."""
    ids = tokenizer.encode(text)
    first, window = tokenizer.eos if tokenizer.bos is None else tokenizer.bos, min(window, model.config.context)
    total = 0.0
    for at in range(0, len(ids), window):
        end = min(at + window, len(ids))
        begin, wanted = (
            max(end - window, 0),
            torch.tensor(ids[at:end]),
        )  # the last, if short, sees as much as the others
        x = torch.tensor([[ids[begin - 1] if begin else first, *ids[begin : end - 1]]])
        h = model.trunk(x.to(device))[0][0, at - begin :]
        for part, rows in zip(h.split(512), wanted.split(512)):  # 512 × vocabulary at once
            total += F.log_softmax(model.head(part).float(), -1).cpu().gather(-1, rows[:, None]).sum().item()
    return total, len(ids)


@torch.no_grad()
def generate(model, tokenizer, prompts, new, *, until=(), device="cpu"):
    """Greedy texts after prompts, all at once: shorter ones are padded on the left, which changes nothing."""
    encoded = [([] if tokenizer.bos is None else [tokenizer.bos]) + tokenizer.encode(p) for p in prompts]
    longest, found, over = max(map(len, encoded)), [[] for _ in prompts], set()
    x = torch.tensor([[tokenizer.eos] * (longest - len(ids)) + ids for ids in encoded])
    mask = torch.tensor([[False] * (longest - len(ids)) + [True] * len(ids) for ids in encoded])
    state, piece = None, 2048  # a prompt is read in pieces, so that memory does not grow with it
    for a, m in zip(x.split(piece, 1), mask.split(piece, 1)):
        h, state = model.trunk(a.to(device), state, mask=None if m.all() else m.to(device))
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
    return [min((text.split(word)[0] for word in until), key=len, default=text) for text in texts]


def answers(model, tokenizer, questions, file=None, *, chunk=128, device="cpu", title=""):
    """What the model answers to each Question -> [dict]; `file` keeps them, a chunk at a time, and has them again."""
    done, keys = {}, [f"{zlib.crc32(repr(q).encode()):08x}" for q in questions]
    if file is not None and file.exists():
        with reading(file, "delete it"):
            done = {
                row["key"]: row for row in map(json.loads, filter(None, file.read_text(encoding="utf-8").split("\n")))
            }
    open_ones = [i for i, key in enumerate(keys) if key not in done]
    open_ones.sort(key=lambda i: len(questions[i].prompt))
    with tqdm(total=len(questions), initial=len(questions) - len(open_ones), desc=title, leave=False) as bar:
        for at in range(0, len(open_ones), chunk):
            part = open_ones[at : at + chunk]
            for i, row in zip(part, answer([questions[i] for i in part], model, tokenizer, device)):
                done[keys[i]] = {"key": keys[i]} | row
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("a", encoding="utf-8") as log:
                    log.writelines(json.dumps(done[keys[i]], ensure_ascii=False) + "\n" for i in part)
            bar.update(len(part))
    return [done[key] for key in keys]


def answer(questions, model, tokenizer, device):
    """-> one dict a Question, all of one kind."""
    if questions[0].pairs:
        found = iter(likelihoods(model, tokenizer, [p for q in questions for p in q.pairs], device=device))
        rows = [[next(found) for _ in q.pairs] for q in questions]
        return [{"ll": [r[0] for r in row], "greedy": row[0][1], "cut": any(r[2] for r in row)} for row in rows]
    if questions[0].text:
        return [dict(zip(("ll", "tokens"), rolling(model, tokenizer, q.text, device=device))) for q in questions]
    rows = []
    for at in range(0, len(questions), 8):
        part = questions[at : at + 8]
        until = ("Question:",) if "####" in part[0].wanted else ("\n",)
        texts = generate(model, tokenizer, [q.prompt for q in part], part[0].new, until=until, device=device)
        rows += [{"text": text} for text in texts]
    return rows


def number_in(text):
    """What a worked solution comes to: the number after ####, else the last one."""
    found = re.findall(r"#### (-?[0-9.,]+)", text)[:1] or re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)[-1:]
    return found[0].replace(",", "").rstrip(".") if found else None


def metrics(questions, answered):
    """-> {metric: values by item}; wikitext's are (log-likelihood, words | bytes | tokens)."""
    if questions[0].text:
        counts = {
            "word_ppl": lambda q, a: q.size[0],
            "byte_ppl": lambda q, a: q.size[1],
            "token_ppl": lambda q, a: a["tokens"],
        }
        return {name: [(a["ll"], n(q, a)) for q, a in zip(questions, answered)] for name, n in counts.items()}
    if questions[0].prompt:
        worked = "####" in questions[0].wanted
        right = lambda q, a: number_in(a["text"]) == number_in(q.wanted) if worked else q.wanted in a["text"]
        return {"acc": [float(right(q, a)) for q, a in zip(questions, answered)]}
    if questions[0].answer is None:
        return {"acc": [float(a["greedy"]) for a in answered], "ppl": [(a["ll"][0], 1) for a in answered]}
    likeliest = lambda values: max(range(len(values)), key=values.__getitem__)
    by_size = lambda q, a: [ll / max(len(c) - 1, 1) for ll, (_, c) in zip(a["ll"], q.pairs)]
    found = {"acc": [float(likeliest(a["ll"]) == q.answer) for q, a in zip(questions, answered)]}
    if len({c for _, c in questions[0].pairs}) > 1:  # winogrande's continuations are all the same
        found["acc_norm"] = [float(likeliest(by_size(q, a)) == q.answer) for q, a in zip(questions, answered)]
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
    """Share of the teacher's accuracy -> (value, 2.5%, 97.5%) by resampling items; the items are the same."""
    both = torch.tensor([ours, theirs], dtype=torch.float64)
    if both[1].sum() == 0:
        return None
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


def show(pair, form=".3f"):
    """'0.654 ± 0.021'."""
    return f"{pair[0]:{form}}" + ("" if math.isnan(pair[1]) else f" ± {pair[1]:{form}}")


def table_of(teacher, others):
    """[row], the first of names: a line a metric, the teacher first, with what each student recovers of an accuracy.

    teacher, others: {"name", "held": of `heldout` or None, "tasks": {task: {metric: values by item}}}; teacher or None.
    """
    models = [m for m in (teacher, *others) if m]
    rows = [["", *(m["name"] for m in models)]]
    fields = {
        "ce": "held-out CE (nats)",
        "kl": "KL to the teacher",
        "agreement": "same top token",
        "answers": "answers right",
    }
    for field, words in fields.items():
        cells = [show(m["held"][field]) if m["held"] and field in m["held"] else "" for m in others]
        first = [m["held"]["teacher_ce"] for m in others if m["held"] and "teacher_ce" in m["held"]]
        if any(cells):
            own = {"ce": show(first[0]) if first else "", "kl": "0", "agreement": "1"}.get(field, "")
            rows.append([words, *([own] if teacher else []), *cells])
    for task, metric in dict.fromkeys((t, name) for m in models for t, found in m["tasks"].items() for name in found):
        cells = []
        for m in models:
            values = m["tasks"].get(task, {}).get(metric)
            cell = show(summary(values)) if values else ""
            if teacher and m is not teacher and values and metric.startswith("acc"):
                share = recovered(values, teacher["tasks"][task][metric])
                cell += f"  {share[0]:.0%} [{share[1]:.0%}, {share[2]:.0%}]" if share else ""
            cells.append(cell)
        n = next(len(m["tasks"][task][metric]) for m in models if task in m["tasks"])
        rows.append([f"{task} {metric} ({n})", *cells])
    return rows


def as_text(rows, markdown=False):
    """Rows in columns, or as a table of Markdown."""
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) if not i else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in rows
    )


def scoreboard(held):
    """The table of one student on held-out text; held: `heldout`'s."""
    teacher = {"name": "teacher", "held": None, "tasks": {}} if "kl" in held else None
    return as_text(table_of(teacher, [{"name": "student", "held": held, "tasks": {}}]))


def compared(models):
    """Lines: each pair of models on each task's items, by McNemar's test."""
    lines = []
    for i, a in enumerate(models):
        for b in models[i + 1 :]:
            for task in a["tasks"].keys() & b["tasks"].keys():
                one, two, p = mcnemar(a["tasks"][task].get("acc", []), b["tasks"][task].get("acc", []))
                if one + two:
                    lines.append(f"{task}: right in {a['name']} alone {one}, in {b['name']} alone {two}, p = {p:.2g}")
    return sorted(lines)


def groups(questions, values):
    """Accuracy by subject or relation -> lines, worst first; none where a task has no such groups."""
    by = {}
    for q, value in zip(questions, values):
        by.setdefault(q.group, []).append(value)
    return [
        f"  {name:<40}{show(mean_and_error(v))}  ({len(v)})"
        for name, v in sorted(by.items(), key=lambda x: sum(x[1]) / len(x[1]))
    ]


def draw_scores(path, models):
    """Bars: accuracies by task, a colour a model, with standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [t for t in dict.fromkeys(t for m in models for t in m["tasks"]) if "acc" in models[0]["tasks"].get(t, {})]
    fig, ax = plt.subplots(figsize=(max(5, 1.4 * len(names)), 4))
    for i, m in enumerate(models):
        found = [summary(m["tasks"][t]["acc"]) if t in m["tasks"] else (math.nan, 0) for t in names]
        places = np.arange(len(names)) + (i - (len(models) - 1) / 2) * 0.8 / len(models)
        ax.bar(places, [v for v, _ in found], 0.8 / len(models), yerr=[e for _, e in found], label=m["name"])
    ax.set(xticks=range(len(names)), ylabel="accuracy")
    ax.set_xticklabels(names, rotation=20)
    ax.legend()
    fig.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(fig)


# ------------------------------------------------------------------ decoding


def after(model, T):
    """The state after T tokens, made up: its size and the work on it are those of a real one."""
    state = model.trunk(torch.zeros(1, 1, dtype=torch.long, device=model.embed.weight.device))[1]
    for block, old in zip(model.blocks, state):
        if block.mixer.decay == "softmax":
            old |= {name: old[name].expand(-1, T, -1, -1).clone() for name in "kv"}
        old["position"] = torch.full_like(old["position"], min(T, model.config.context - 1))
    return state


@torch.no_grad()
def print_decoding(models, lengths, new=16, repeats=5):
    """Tokens a second and bytes of state against context, for [(name, model)]; -> rows [name, T, tokens/s, bytes]."""
    rows, token = [], torch.zeros(1, 1, dtype=torch.long)
    print(f"{'context':>8}" + "".join(f"{name[:24]:>26}" for name, _ in models) + "   (tokens/s, MiB of state)")
    for T in lengths:
        line = f"{T:>8}"
        for name, model in models:
            at, speeds, start = token.to(model.embed.weight.device), [], after(model, T)
            for _ in range(repeats):
                state, began = start, time.perf_counter()
                for _ in range(new):
                    h, state = model.trunk(at, state)
                    model.head(h[:, -1]).argmax(-1).item()
                speeds.append(new / (time.perf_counter() - began))
            size = sum(z.numel() * z.element_size() for layer in start for z in layer.values() if z.is_floating_point())
            rows.append([name, T, sorted(speeds)[repeats // 2], size])
            line += f"{rows[-1][2]:>14.1f}{size / 2**20:>12.1f}"
        print(line)
    return rows


def draw_decoding(path, rows):
    """Tokens a second, and state, against context."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    for name in dict.fromkeys(row[0] for row in rows):
        T, speed, size = zip(*(row[1:] for row in rows if row[0] == name))
        axes[0].plot(T, speed, "o-", label=name)
        axes[1].plot(T, [n / 2**20 for n in size], "o-", label=name)
    for ax, words in zip(axes, ("tokens a second", "MiB of state")):
        ax.set(xlabel="tokens before", ylabel=words, xscale="log", yscale="log")
    axes[0].legend()
    fig.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(fig)


# ------------------------------------------------------------------ lm-eval


class Harness:
    """A model as lm-eval's `simple_evaluate` takes it (pip install lm-eval), so that its tasks run by name."""

    def __init__(self, model, tokenizer, device="cpu"):
        from lm_eval.api.model import LM

        LM.register(Harness)
        self.model, self.tokenizer, self.device, self.rank, self.world_size = model, tokenizer, device, 0, 1
        self.task_dict, self.tokenizer_name = {}, "nanolinear"

    def set_cache_hook(self, hook):
        """lm-eval's own cache is not used: `simple_evaluate` calls this."""

    def loglikelihood(self, requests, **_):
        with tqdm(total=len(requests), desc="lm-eval") as bar:
            pairs = [r.args for r in requests]
            return [r[:2] for r in likelihoods(self.model, self.tokenizer, pairs, device=self.device, bar=bar)]

    def loglikelihood_rolling(self, requests, **_):
        return [rolling(self.model, self.tokenizer, r.args[0], device=self.device)[0] for r in tqdm(requests)]

    def generate_until(self, requests, **_):
        texts = []
        for context, how in tqdm([r.args for r in requests]):
            until = how.get("until") or []
            until, new = [until] if isinstance(until, str) else until, how.get("max_gen_toks", 256)
            texts += generate(self.model, self.tokenizer, [context], new, until=until, device=self.device)
        return texts


def with_lm_eval(model, tokenizer, names, limit, device):
    """Scores of lm-eval's tasks by name -> {task: {metric: (value, standard error)}}."""
    import lm_eval

    found = lm_eval.simple_evaluate(Harness(model, tokenizer, device), tasks=names, limit=limit or None)["results"]
    value = lambda x: x if isinstance(x, float) else math.nan
    return {
        task: {
            key.split(",")[0]: (x, value(row.get(key.replace(",", "_stderr,"))))
            for key, x in row.items()
            if isinstance(x, float) and "_stderr" not in key
        }
        for task, row in found.items()
    }


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


# ------------------------------------------------------------------ python evaluate.py


def parser():
    """Every flag."""
    p = Parser(description="Score runs and teachers beside each other.", allow_abbrev=False)
    p.add_argument("models", nargs="+", help="run folders, or anything --teacher of train.py takes")
    p.add_argument(
        "--tasks",
        default="",
        help=f"comma list of {', '.join(TASKS)}, niah_1, niah_2, niah_3, and lm-eval's own (none)",
    )
    p.add_argument("--limit", type=int, default=0, help="only N items of a task (default 0: all; a needle task: 100)")
    p.add_argument(
        "--shots", type=int, help="examples shown first, mmlu and gsm8k (default 0, mmlu_letters and gsm8k 5)"
    )
    p.add_argument(
        "--lengths", default="", help="contexts of needle tasks and --decode (default 512,1024,2048; to 65536)"
    )
    p.add_argument("--haystack", help="text to hide needles in: file or folder (default: docstrings of Python…)")
    p.add_argument("--data-dir", help="folder with the tasks' files (default: the hub)")
    p.add_argument("--baseline", help="teacher to stand beside them (default: the first run's own; none: nobody)")
    p.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"], help="matmuls (default auto)")
    p.add_argument("--decode", action="store_true", help="measure tokens a second and state against context")
    p.add_argument("--groups", action="store_true", help="also accuracy by subject (mmlu) or relation (bear)")
    p.add_argument("--prompt", help="also continue this text, greedily")
    p.add_argument("--chat", action="store_true", help="the prompt is a user's turn, in the model's chat template")
    p.add_argument("--out", help="folder for scores.json, scores.md and scores.png (default: a single run's own)")
    return p


def read_flags():
    """-> (flags, [(task, needle length or None)], [lm-eval's tasks], lengths)."""
    args = parser().parse_args()
    if args.limit < 0 or (args.shots or 0) < 0:
        raise BadInput(f"--limit {args.limit} --shots {args.shots}: wanted 0 (all items, no examples) or more")
    try:
        lengths = [int(n) for n in args.lengths.split(",") if n]
    except ValueError:
        raise BadInput(f"--lengths {args.lengths!r}: wanted numbers of tokens, as 512,4096") from None
    if any(n < 128 for n in lengths):
        raise BadInput(f"--lengths {args.lengths}: a needle's prompt alone takes 100 tokens; wanted 128 or more")
    ours, theirs = [], []
    for task in filter(None, args.tasks.split(",")):
        if task in TASKS:
            ours.append((task, None))
        elif task in ("niah_1", "niah_2", "niah_3"):
            ours += [(task, n) for n in lengths or (512, 1024, 2048)]
        else:
            theirs.append(task)
    if theirs:
        near = difflib.get_close_matches(theirs[0], [*TASKS, "niah_1"], 1) or list(TASKS)
        unknown = (
            f"task {theirs[0]!r} is not known; did you mean {near[0]!r}? There are {', '.join(TASKS)}, niah_1 to 3"
        )
        try:
            from lm_eval.tasks import TaskManager
        except ImportError:
            raise BadInput(f"{unknown}; with pip install lm-eval also its tasks") from None
        if not TaskManager().match_tasks(theirs):
            raise BadInput(f"{unknown}, and none of lm-eval is called so")
    return args, ours, theirs, lengths


def ask(task, length, args, tokenizer):
    """The Questions of a task."""
    if length is None:
        return questions_of(task, args.data_dir, args.limit, args.shots)
    text = "".join(part + "\n" for part, _ in zip(documents(args.haystack), range(200))) if task != "niah_1" else ""
    return needles(int(task[-1]), length, tokenizer, text, args.limit or 100)


def scored(name, model, tokenizer, teacher, args, tasks, theirs, device):
    """All scores of one model: {"name", "held", "tasks": by item, "harness": of lm-eval}."""
    folder = Path(name)
    is_run = (folder / "args.json").exists()
    mark = zlib.crc32(b"".join(p.detach().float().cpu().flatten()[:64].numpy().tobytes() for p in model.parameters()))
    log = (folder if is_run else CACHE) / "answers"
    held, found = None, {}
    if is_run and (folder / "heldout.safetensors").exists():
        from safetensors.torch import load_file

        with reading(folder / "heldout.safetensors", "delete it to score tasks alone"):
            held = heldout(model, teacher, load_file(folder / "heldout.safetensors")["tokens"].long().to(device))
    elif is_run:
        print(f"{folder}: no heldout.safetensors in it, so no held-out text is scored")
    for task, length in tasks:
        questions = ask(task, length, args, tokenizer)
        title = f"{task}@{length}" if length else task
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        file = log / f"{title}-{mark:08x}-{dtype}.answers"
        answered = answers(model, tokenizer, questions, file, device=device, title=f"{folder.name} {title}")
        if cut := sum(a.get("cut", False) for a in answered):
            print(
                f"{name}: {cut} of {len(answered)} items of {task} are longer than its context; the beginnings are cut"
            )
        found[title] = metrics(questions, answered)
        if args.groups and questions[0].group and not length:
            print(f"{name}, {task} by group:", *groups(questions, found[title]["acc"]), sep="\n")
    harness = with_lm_eval(model, tokenizer, theirs, args.limit, device) if theirs else {}
    return {"name": folder.name if is_run else name, "held": held, "tasks": found, "harness": harness}


def main():
    """Score models, their teacher beside them; in a run, or in --out, write the scores."""
    from surgery import stream

    args, tasks, theirs, lengths = read_flags()
    told = [read_json(Path(m) / "args.json") if (Path(m) / "args.json").exists() else {} for m in args.models]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, why = precision(device, args.precision)
    print(f"precision: {str(dtype).removeprefix('torch.')} matmuls, {why}")
    baseline = args.baseline or next((t["teacher"] for t in told if t.get("teacher")), None)
    teacher = None if baseline in (None, "none") else load_teacher(baseline, dtype=dtype, device=device)
    rows, pairs = [], [(baseline, teacher[0])] if teacher else []
    with autocast(device, dtype):
        first = scored(baseline, *teacher, None, args, tasks, theirs, device) if teacher else None
        for name in args.models:
            model, tokenizer = load_teacher(name, dtype=dtype, device=device)
            if teacher and teacher[0].config.vocab != model.config.vocab:
                ids = f"it has {teacher[0].config.vocab} ids, {name} {model.config.vocab}"
                raise BadInput(f"--baseline {baseline}: {ids}; give the model's own teacher")
            rows.append(scored(name, model, tokenizer, teacher and teacher[0], args, tasks, theirs, device))
            if args.prompt:
                stream(model, tokenizer, args.prompt, 60, chat=args.chat)
            if args.decode:
                pairs.append((rows[-1]["name"], model))
        table = table_of(first, rows)
        print("\n" + as_text(table))
        print(*compared(rows), sep="\n", end="\n" if len(rows) > 1 else "")
        for m in [first, *rows] if theirs else ():
            print(
                *(f"{m['name']}: {t} {k} {show(v)}" for t, found in m["harness"].items() for k, v in found.items()),
                sep="\n",
            )
        decoded = print_decoding(pairs, lengths or [512 * 4**i for i in range(4)] + [65536]) if args.decode else None
    target = Path(args.out) if args.out else Path(args.models[0]) if told[0] and len(rows) == 1 else None
    if target:
        write(target, table, [m for m in (first, *rows) if m], decoded, dtype)


def write(target, table, models, decoded, dtype):
    """evaluation.json (scores of other tasks, from before, stay), evaluation.md, and figures."""
    target.mkdir(parents=True, exist_ok=True)
    file = target / "evaluation.json"
    before = read_json(file).get("models", {}) if file.exists() else {}
    for m in models:
        found = {t: {k: (*summary(v), len(v)) for k, v in row.items()} for t, row in m["tasks"].items()} | m["harness"]
        kept = before.get(m["name"], {}).get("tasks", {})
        before[m["name"]] = {"held": m["held"], "tasks": kept | found}
    file.write_text(json.dumps({"models": before, "decoding": decoded, "precision": str(dtype)}, indent=1))
    (target / "evaluation.md").write_text(as_text(table, markdown=True) + "\n", encoding="utf-8")
    if any("acc" in found for found in models[0]["tasks"].values()):
        draw_scores(target / "evaluation.png", models)
    if decoded:
        draw_decoding(target / "decoding.png", decoded)
    print(f"written: {target}/evaluation.json, evaluation.md and figures")


if __name__ == "__main__":
    cli(main)
