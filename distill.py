"""Stages and recipes: what a student is asked to match, in which order, and what may change meanwhile.

A stage's loss is a function (student, teacher, tokens, backward=None, **options) -> dict of means over sequences, all
of one length. Each one but `ce`, `sft`, and `logits` with ce > 0, is exactly 0 for student = teacher. Without
`backward`, dict["loss"] carries the graph. With backward=(a function of a scalar) a stage hands over each layer's or
block of tokens' share as soon as it exists, so that memory grows neither with depth (the first four) nor with
tokens × vocabulary (the others), and the dict holds numbers.

A recipe is a row of data: its stages in order. A new stage is a function here and an entry in STAGES.
Nothing here steps an optimizer, reads a file or prints.
"""

import dataclasses
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize

from mixers import wide

# ------------------------------------------------------------------ stages


def matrix(student, teacher, tokens, backward=None):
    """A mixer's token-mixing matrix against the teacher's attention, both made of the teacher's hidden states.

    Mean over layers, sequences and heads of ‖M_student − M_teacher‖_F / ‖M_teacher‖_F (MOHAWK 2408.10189 eq. 4; the
    division makes lengths and heads comparable). W_v and W_o have no part in it.
    """
    losses = []
    for theirs, (ours, x, *_) in zip(teacher.blocks, layers(student, teacher, tokens)):
        with torch.no_grad():
            A = theirs.mixer.matrix(x)
        error = root((ours.mixer.matrix(x) - A).square().sum((-1, -2))) / A.square().sum((-1, -2)).sqrt()
        losses.append(share(error.mean() / len(teacher.blocks), backward))
    return {"loss": sum(losses), "matrix": sum(losses)}


def weights(student, teacher, tokens, backward=None):
    """Rows of attention weights against the teacher's, for mixers whose rows are weights: positive, over their sum.

    Mean over layers, heads and tokens of KL(teacher ‖ student) (Hedgehog 2402.04347 eq. 5, whose cross-entropy is this
    and the teacher's own entropy).
    """
    losses = []
    for theirs, (ours, x, *_) in zip(teacher.blocks, layers(student, teacher, tokens)):
        with torch.no_grad():
            A = wide(theirs.mixer.matrix(x)).clamp(min=1e-9)
        M = wide(ours.mixer.matrix(x)).clamp(min=1e-9)
        ratio = (A / M) * (M.sum(-1, keepdim=True) / A.sum(-1, keepdim=True))
        losses.append(share((A * ratio.log()).sum(-1).mean() / len(teacher.blocks), backward))
    return {"loss": sum(losses), "weights": sum(losses)}


def attention(student, teacher, tokens, backward=None):
    """Mixer output against the teacher's attention output, both after W_o, both fed the teacher's hidden states.

    Mean over layers and sequences of ‖y_student − y_teacher‖² / ‖y_teacher‖² (2504.14366 stage 1; LoLCATs 2410.10254
    eq. 6; the division makes layers and teachers comparable: 1 is as good as an output of 0).
    """
    losses = []
    for ours, x, y, _, _ in layers(student, teacher, tokens):
        error = (ours.mixer(x)[0] - y).square().sum((1, 2)) / y.square().sum((1, 2))
        losses.append(share(error.mean() / len(teacher.blocks), backward))
    return {"loss": sum(losses), "attention": sum(losses)}


def hidden(student, teacher, tokens, backward=None):
    """A block's output against the teacher's next hidden state, fed the teacher's hidden state before it.

    Mean over layers and tokens of ‖Block(h) − h_next‖₂ / rms ‖h_next‖₂, the rms over a sequence (MOHAWK 2408.10189
    eq. 5; 2504.14366 stage 2).
    """
    losses = []
    for ours, _, _, h, after in layers(student, teacher, tokens):
        distance = root((ours(h)[0] - after).square().sum(-1))
        scale = after.square().sum(-1).mean(-1, keepdim=True).sqrt() * len(teacher.blocks)
        losses.append(share((distance / scale).mean(), backward))
    return {"loss": sum(losses), "hidden": sum(losses)}


def root(z):
    """√z with a gradient of 0 at 0, where the true one is not finite."""
    return torch.where(z > 0, z, 1).sqrt() * (z > 0)


def logits(student, teacher, tokens, backward=None, *, kl=1.0, ce=0.0, temperature=1.0, block=512, learn=None):
    """kl · KL(teacher ‖ student) + ce · CE of the next token, reported apart (2504.14366 eq. 3; 1503.02531).

    Every position but the last counts, or those before the tokens that `learn` (B, T) marks. The vocabulary is met
    `block` tokens at a time.
    """
    kept = slice(None) if learn is None else learn[:, 1:].flatten()
    with torch.no_grad():
        target = teacher.trunk(tokens)[0][:, :-1].flatten(0, 1)[kept] if kl else None
    h = student.trunk(tokens)[0][:, :-1].flatten(0, 1)[kept]
    leaf = h.detach().requires_grad_() if backward and h.requires_grad else h
    total, sums = 0.0 if len(h) else share(h.sum() * 0, backward), {"kl": 0.0, "ce": 0.0}
    following = tokens[:, 1:].flatten()[kept]
    weights = kl / max(len(h), 1), ce / max(len(h), 1)
    for at in range(0, len(h), block):
        rows = slice(at, at + block)
        with torch.no_grad():
            wanted = teacher.head(target[rows]) if kl else None
        loss, *both = Divergence.apply(student.head(leaf[rows]), wanted, following[rows], *weights, temperature)
        total = total + share(loss, backward)
        sums = {name: sums[name] + value / len(h) for name, value in zip(sums, both)}
    if leaf is not h and len(h):
        share(h, lambda h: h.backward(leaf.grad))  # outside autocast, as every share
    return {"loss": total} | sums


class Divergence(torch.autograd.Function):
    """kl_weight · temperature² KL(teacher ‖ student) + ce_weight · CE, summed over rows; and both sums, no gradient.

    logits, wanted (the teacher's, or None) (n, vocab), following (n,). CE is of the logits as they are, KL of both over
    the temperature. Derived by hand, since autograd would pass over the vocabulary twice as often: with p and t the
    softmax of both, dKL/dlogits = (p − t) / temperature and dCE/dlogits = p − onehot.
    """

    @staticmethod
    def forward(ctx, logits, wanted, following, kl_weight, ce_weight, temperature):
        log_p, rows = log_softmax(logits), torch.arange(len(logits), device=logits.device)
        nll, kl, grad = -log_p[rows, following].sum(), log_p.new_zeros(()), 0.0
        if wanted is not None:
            soft = log_p if temperature == 1 else log_softmax(logits, temperature)
            log_t = log_softmax(wanted, temperature)
            t = log_t.exp()
            kl = (torch.dot(t.flatten(), log_t.flatten()) - torch.dot(t.flatten(), soft.flatten())) * temperature**2
        if ctx.needs_input_grad[0]:
            if wanted is not None:
                grad = t.neg_().add_(soft.exp()).mul_(kl_weight * temperature)
            if ce_weight:
                grad = log_p.exp_().mul_(ce_weight).add_(grad)
                grad[rows, following] -= ce_weight
            ctx.save_for_backward(grad.to(logits.dtype))
        ctx.mark_non_differentiable(kl, nll)
        return kl_weight * kl + ce_weight * nll, kl, nll

    @staticmethod
    def backward(ctx, by_loss, *_):
        return ctx.saved_tensors[0] * by_loss.to(ctx.saved_tensors[0].dtype), None, None, None, None, None


def log_softmax(logits, temperature=1.0):
    """In float32 at least: bf16 logits near 20 are 0.1 apart."""
    return F.log_softmax(wide(logits) if temperature == 1 else wide(logits) / temperature, -1)


def ce(student, teacher, tokens, backward=None, *, block=512):
    """Next-token cross-entropy alone; the teacher is not asked (SUPRA 2405.06640, T2R 2103.13076)."""
    losses = logits(student, teacher, tokens, backward, kl=0.0, ce=1.0, block=block)
    return {"loss": losses["loss"], "ce": losses["ce"]}


def sft(student, teacher, tokens, backward=None, *, learn=None, block=512):
    """Cross-entropy of the assistant's tokens alone, those that `learn` (B, T) marks (instruction tuning)."""
    losses = logits(student, teacher, tokens, backward, kl=0.0, ce=1.0, block=block, learn=learn)
    return {"loss": losses["loss"], "sft": losses["ce"]}


LOCAL = ("matrix", "weights", "attention", "hidden")  # each layer by itself, on the teacher's hidden states
STAGES = {f.__name__: f for f in (matrix, weights, attention, hidden, logits, ce, sft)}


def unmark(tokens):
    """Tokens, where what is read but not learned (of a chat) stands as ~id -> (ids, learn), both (B, T)."""
    return torch.where(tokens < 0, ~tokens, tokens), tokens >= 0


def layers(student, teacher, tokens):
    """The teacher's pass, layer by layer: (our block, attention's input, its output, h before, h after)."""
    with torch.no_grad():
        h = teacher.embedded(tokens)
    for ours, theirs in zip(student.blocks, teacher.blocks):
        with torch.no_grad():
            x = theirs.norm1(h)
            y = theirs.mixer(x)[0]
            after = h + y
            after = after + theirs.mlp(theirs.norm2(after))
        yield ours, x, y.to(h.dtype), h, after
        h = after


def share(loss, backward):
    """Keep the graph of a share of the loss, or hand it to `backward` at once and keep its number."""
    if backward is None:
        return loss
    if loss.requires_grad:
        with torch.autocast(loss.device.type, enabled=False):  # else the gradients of float32 matmuls are bf16 ones
            backward(loss)
    return loss.detach()


# ------------------------------------------------------------------ recipes


@dataclasses.dataclass
class Stage:
    """One row of a recipe: which loss, its fraction of the tokens, its learning rate and schedule, and what trains.

    schedule: a row of SCHEDULES, from lr down to floor · lr, after a warm-up over a share `warmup` of the steps.
    trains: a row of TRAINS. rates: {role: factor on lr}, a role being "trunk", "mixer" or "new" as in `role`.
    lora: rank of a low-rank change of q, k, v and o, trained instead of them (0: none). context: times --context.
    """

    loss: str
    fraction: float
    lr: float
    schedule: str = "wsd"
    trains: str = "all"
    floor: float = 0.0
    warmup: float = 0.05
    rates: dict = dataclasses.field(default_factory=dict)
    lora: int = 0
    context: int = 1
    options: dict = dataclasses.field(default_factory=dict)

    def unusual(self):
        """What beside loss, lr, schedule, trains and context is not the default, in words."""
        told = {n: getattr(self, n) for n in ("warmup", "floor", "lora") if getattr(self, n) != getattr(Stage, n)}
        told |= self.options | {f"{role} ×": factor for role, factor in self.rates.items()}
        return [f"{name} {value:.4g}" for name, value in told.items()]


SCHEDULES = {  # done: share of the stage's steps; cuts: how often its held-out loss has come to rest
    "wsd": lambda done, cuts: min(1.0, (1 - done) / 0.2),  # flat, then down over the last fifth
    "cosine": lambda done, cuts: 0.5 + 0.5 * math.cos(math.pi * done),
    "linear": lambda done, cuts: 1 - done,
    "constant": lambda done, cuts: 1.0,
    "plateau": lambda done, cuts: 0.5**cuts,  # as `cuts_in` counts; LoLCATs' own patience is for longer runs
}
TRAINS = {  # which parameters, by name; those of layers kept softmax train under "blocks" and "all" only
    "maps": lambda name: ".phi." in name,  # feature maps; of a mixer whose maps do not learn: "new"
    "new": lambda name: role(name) == "new",
    "mixers": lambda name: role(name) != "trunk",
    "blocks": lambda name: name.startswith("blocks."),
    "all": lambda name: True,
    "lora": lambda name: ".parametrizations." in name and not name.endswith(".original"),
}


def role(name):
    """Of a parameter: "mixer" (q, k, v, o and their norms, the teacher's), "new" (the rest of a mixer) or "trunk"."""
    if ".mixer." not in name:
        return "trunk"
    part = name.split(".mixer.")[1].split(".")[0]
    return "mixer" if part in ("q", "k", "v", "o", "q_norm", "k_norm") else "new"


RECIPES = {  # rates are the papers' unless a comment says otherwise; they were set for 40M to 100B tokens
    "haller": [  # 2504.14366 section 4: 3B to 10B tokens
        Stage("attention", 0.026, 2e-4, trains="mixers"),
        Stage("hidden", 0.053, 2e-3, trains="blocks"),
        Stage("logits", 0.921, 3e-4, "linear", options={"ce": 1.0}),
    ],
    "mohawk": [  # 2408.10189: 80M, 160M, 2.76B tokens; the rates are haller's
        Stage("matrix", 0.027, 2e-4, trains="mixers"),
        Stage("hidden", 0.053, 2e-3, trains="blocks"),
        Stage("logits", 0.92, 3e-4),
    ],
    # 2405.06640, 1B models and 10B to 100B tokens; for 7B it goes from 3e-5 to 1e-5
    "supra": [Stage("ce", 1.0, 3e-4, "cosine", floor=1 / 30)],
    "t2r": [Stage("ce", 1.0, 2.5e-4, "linear")],  # 2103.13076: swap, then finetune
    "hedgehog": [  # 2402.04347: the maps learn the weights, then all finetunes
        Stage("weights", 0.3, 1e-2, "plateau", trains="maps"),
        Stage("ce", 0.7, 6e-4, "linear"),
    ],
    "lolcats": [  # 2410.10254: 40M tokens; new: φ and the blend's scale, as there, and our short convolution
        Stage("attention", 0.5, 1e-2, "plateau", trains="new"),
        Stage("ce", 0.5, 1e-4, "plateau", trains="lora", lora=8),
    ],
    "radlads": [  # 2505.03005: 100M, 500M, 100M tokens, the last at 16k
        Stage("attention", 0.143, 1e-3, "cosine", trains="mixers", floor=0.01),
        Stage("logits", 0.714, 1e-5, "constant"),
        Stage("ce", 0.143, 1e-5, "constant", context=4),
    ],
    # after `calibrate`, which solves W_o, every token goes to KL; after a warm-up of two steps gradients had spikes
    "default": [Stage("logits", 1.0, 7e-4, "linear", warmup=0.2)],
    "pretrain": [Stage("ce", 1.0, 1e-3, "cosine", floor=0.1)],  # from scratch
    "recall": [Stage("sft", 1.0, 1e-3, "cosine")],  # exercises, from scratch
    "sft": [Stage("sft", 1.0, 2e-5, "cosine", floor=0.1)],  # on chats
    "hybrid": [Stage("logits", 1.0, 2e-5, "linear")],  # starts near; 1e-4 brought it no nearer (results/starts.md)
}


PAPERS = {  # flags that a recipe's paper trains with; a run without them is told so
    "lolcats": ("--window 64", "--option blend=shared"),
    "mohawk": ("--context 2048",),
    "supra": ("--context 2048",),
}


def trainable(student, trains):
    """Set requires_grad by a stage's `trains` -> the names of what trains (a tied head: its embedding's)."""
    kept = tuple(f"blocks.{i}." for i, name in enumerate(student.config.mixers) if name == "softmax")
    if trains == "maps" and not any(TRAINS["maps"](name) for name, _ in student.named_parameters()):
        trains = "new"
    names = []
    for name, p in student.named_parameters():
        p.requires_grad_(TRAINS[trains](name) and (trains in ("blocks", "all") or not name.startswith(kept)))
        names += [name] if p.requires_grad else []
    return names


def check_stage(stage, student):
    """ValueError if this student has no such loss, or nothing that the stage trains."""
    linear = [block.mixer for block in student.blocks if block.mixer.decay != "softmax"]
    rows = [m.denominator and not m.signed and (not m.window or m.blend == "shared") for m in linear]
    if stage.loss == "weights" and not all(rows):
        raise ValueError("stage weights: wanted a mixer whose rows are weights, as hedgehog, t2r, rebased, based are")
    if not linear and stage.trains not in ("blocks", "all"):
        raise ValueError(f"stage {stage.loss} trains new mixers, and here are none; try --recipe supra")


class LoRA(nn.Module):
    """W + (α / r) B A in the place of W, B from 0 (arXiv 2106.09685 eq. 3); α = 2 r, as LoLCATs has it."""

    def __init__(self, weight, rank, seed):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        A = torch.randn(rank, weight.size(1), generator=g) / weight.size(1) ** 0.5
        self.A = nn.Parameter(A.to(weight))
        self.B = nn.Parameter(weight.new_zeros(weight.size(0), rank))

    def forward(self, W):
        with torch.autocast(W.device.type, enabled=False):
            return W + 2 * self.B @ self.A


def set_lora(student, rank):
    """Give q, k, v, o of the linear mixers a LoRA of this rank; 0 merges those there are into the weights."""
    for i, block in enumerate(student.blocks):
        for j, name in enumerate("qkvo"):
            linear = getattr(block.mixer, name)
            if rank == 0 and parametrize.is_parametrized(linear):
                parametrize.remove_parametrizations(linear, "weight")
            elif rank and block.mixer.decay != "softmax" and not parametrize.is_parametrized(linear):
                parametrize.register_parametrization(linear, "weight", LoRA(linear.weight, rank, 4 * i + j))


# ------------------------------------------------------------------ calibration


@torch.no_grad()
def rank_layers(student, teacher, tokens):
    """KL on tokens, and what softmax in one layer makes of it -> KL, [(KL then, layer)], least first."""
    kl, found = lambda: logits(student, teacher, tokens)["kl"].item(), []
    for i, (ours, theirs) in enumerate(zip(student.blocks, teacher.blocks)):
        mine, ours.mixer = ours.mixer, theirs.mixer
        found.append((kl(), i))
        ours.mixer = mine
    return kl(), sorted(found)


@torch.no_grad()
def calibrate(student, teacher, tokens, *, ridges=(0.03, 0.1, 0.3, 1.0, 3.0)):
    """Before any step, from one batch, tokens (B ≥ 2, T): heads remember as far as the teacher's look, then W_o fits.

    Each head's level is fitted to the teacher's head. The attention stage is least squares in W_o, so its optimum has a
    formula: W = (YᵀO + λW₀)(OᵀO + λI)⁻¹, O what W_o reads, Y the attention output, both from the teacher's hidden
    states, W₀ the teacher's W_o, λ = ridge · mean diagonal of OᵀO. The layers' errors add up, so the nearest layers
    need not make the nearest model: the last sequence, which nothing is fitted to, chooses among the ridges and W₀.
    -> {ridge: KL there}, W₀ as ridge ∞.
    """
    fits = {}
    for theirs, (ours, x, y, _, _) in zip(teacher.blocks, layers(student, teacher, tokens[:-1])):
        if ours.mixer.decay == "softmax":
            continue
        ours.mixer.remember(reach(theirs.mixer, x[:4]))
        O = fit_level(ours.mixer, before_projection(theirs.mixer, x), x)
        by_sequence = y.double().square().sum((1, 2)).rsqrt().cpu().repeat_interleave(x.size(1))[:, None]
        O, Y = O * by_sequence, y.cpu().double().flatten(0, 1) * by_sequence  # as the stage weighs them
        fits[ours.mixer.o.weight] = O.T @ O, O.T @ Y, ours.mixer.o.weight.clone()

    def fit(ridge):
        for weight, (gram, cross, W0) in fits.items():
            damp = ridge * gram.diagonal().mean()
            solved = torch.linalg.solve(gram + damp * torch.eye(len(gram)), cross + damp * W0.T.cpu().double())
            weight.copy_(solved.T if ridge < math.inf else W0)
        torch.clear_autocast_cache()  # it may hold the weights from before

    found = {}
    for ridge in (*ridges, math.inf):
        fit(ridge)
        found[ridge] = logits(student, teacher, tokens[-1:])["kl"].item()
    fit(min(found, key=found.get))
    return found


def fit_level(mixer, wanted, x):
    """Set each head's level so that what W_o reads is nearest to wanted, (B T, H V); -> what it reads then.

    A window's part, which the level does not touch, is subtracted first; one denominator for both has no such part.
    """
    if mixer.blend == "shared":
        return before_projection(mixer, x)
    parts = []
    mixer.scale.fill_(1)
    for level in (0.0, 1.0):
        mixer.level.fill_(level)
        parts.append(before_projection(mixer, x).unflatten(-1, (mixer.heads, -1)))
    rest, recalled = parts[0], parts[1] - parts[0]
    wanted = F.pad(wanted.unflatten(-1, (mixer.heads, -1)), (0, rest.size(-1) - wanted.size(-1) // mixer.heads))
    level = (recalled * (wanted - rest)).sum((0, 2)) / recalled.square().sum((0, 2)).clamp(min=1e-30)
    mixer.level.copy_(level[:, None])
    return (rest + level[:, None] * recalled).flatten(1)


def before_projection(mixer, x):
    """What a mixer's W_o reads, x (B, T, width) -> (B T, H V) in float64 on the CPU."""
    seen = []
    hook = mixer.o.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    mixer(x)
    hook.remove()
    return seen[0].cpu().double().flatten(0, 1)


def reach(attention, x, first=4):
    """-> (H,): the tokens back within which half of a head's softmax weight falls; x (B, T, width).

    The `first` tokens are left out: a head with nothing to say looks there (arXiv 2309.17453).
    """
    A = attention.matrix(x).float().sum(0)  # (H, T, T)
    A[..., :first] = 0
    T = A.size(-1)
    back = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0).flatten()
    by_distance = torch.stack([torch.bincount(back, head.flatten(), T) for head in A.cpu()])
    share = by_distance.cumsum(-1) / by_distance.sum(-1, keepdim=True).clamp(min=1e-9)
    return ((share < 0.5).sum(-1).clamp(max=T - 1) + 0.5).to(x.device)
