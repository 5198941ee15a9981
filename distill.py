"""Stages and recipes: what a student is asked to match, in which order, and what may change meanwhile.

A stage's loss is a function (student, teacher, tokens, backward=None, **options) -> dict of means per token. Each one
but `ce`, and `logits` with ce > 0, is exactly 0 for student = teacher. Without `backward`, dict["loss"] carries the
graph. With backward=(a function of a scalar) a stage hands over each layer's or block of tokens' share as soon as it
exists, so that memory grows neither with depth (attention, hidden) nor with tokens × vocabulary (logits, ce), and the
dict holds numbers.

A recipe is a row of data: its stages in order. A new stage is a function here and an entry in STAGES.
Nothing here steps an optimizer, reads a file or prints.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F

from mixers import wide

# ------------------------------------------------------------------ stages


def attention(student, teacher, tokens, backward=None):
    """Mixer output against the teacher's attention output, both after W_o, both fed the teacher's hidden states.

    Mean over layers of ‖y_student − y_teacher‖² / ‖y_teacher‖² (2504.14366 stage 1; LoLCATs 2410.10254 eq. 6; the
    division makes layers and teachers comparable: 1 is as good as an output of 0).
    """
    losses = []
    for ours, x, y, _, _ in layers(student, teacher, tokens):
        error = (ours.mixer(x)[0] - y).square().sum() / y.square().sum()
        losses.append(share(error / len(teacher.blocks), backward))
    return {"loss": sum(losses), "attention": sum(losses)}


def hidden(student, teacher, tokens, backward=None):
    """A block's output against the teacher's next hidden state, fed the teacher's hidden state before it.

    Mean over layers and tokens of ‖Block(h) − h_next‖₂ / rms ‖h_next‖₂ (MOHAWK 2408.10189 eq. 5; 2504.14366 stage 2).
    """
    losses = []
    for ours, _, _, h, after in layers(student, teacher, tokens):
        distance = (ours(h)[0] - after).square().sum(-1)
        distance = torch.where(distance > 0, distance, 1).sqrt() * (distance > 0)  # the gradient of √0 is not finite
        scale = after.square().sum(-1).mean().sqrt() * len(teacher.blocks)
        losses.append(share((distance / scale).mean(), backward))
    return {"loss": sum(losses), "hidden": sum(losses)}


def logits(student, teacher, tokens, backward=None, *, kl=1.0, ce=0.0, temperature=1.0, block=512):
    """kl · KL(teacher ‖ student) + ce · CE of the next token, reported apart (2504.14366 eq. 3; 1503.02531).

    Every position but the last counts. The vocabulary is met `block` tokens at a time.
    """
    with torch.no_grad():
        target = teacher.trunk(tokens)[0][:, :-1].flatten(0, 1) if kl else None
    h = student.trunk(tokens)[0][:, :-1].flatten(0, 1)
    leaf = h.detach().requires_grad_() if backward and h.requires_grad else h
    total, sums = 0.0, {"kl": 0.0, "ce": 0.0}
    following = tokens[:, 1:].flatten()
    weights = kl / len(h), ce / len(h)
    for at in range(0, len(h), block):
        rows = slice(at, at + block)
        with torch.no_grad():
            wanted = teacher.head(target[rows]) if kl else None
        loss, *both = Divergence.apply(student.head(leaf[rows]), wanted, following[rows], *weights, temperature)
        total = total + share(loss, backward)
        sums = {name: sums[name] + value / len(h) for name, value in zip(sums, both)}
    if leaf is not h:
        h.backward(leaf.grad)
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


STAGES = {"attention": attention, "hidden": hidden, "logits": logits, "ce": ce}


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
        backward(loss)
    return loss.detach()


# ------------------------------------------------------------------ recipes


@dataclasses.dataclass
class Stage:
    """One row of a recipe: which loss, its fraction of the tokens, its learning rate and schedule, and what trains.

    trains: "mixers" (but none that stayed softmax) | "blocks" | "all".
    schedule: "wsd" (flat, then down to 0 over the last fifth) | "cosine" (to a tenth) | "linear" (to 0).
    """

    loss: str
    fraction: float
    lr: float
    schedule: str = "wsd"
    trains: str = "all"
    options: dict = dataclasses.field(default_factory=dict)


RECIPES = {
    "haller": [  # 2504.14366 section 4: 3B to 10B tokens, context 512
        Stage("attention", 0.026, 2e-4, trains="mixers"),
        Stage("hidden", 0.053, 2e-3, trains="blocks"),
        Stage("logits", 0.921, 3e-4, "linear", options={"kl": 1.0, "ce": 1.0}),
    ],
    "default": [  # after `calibrate`, which fits W_o to the attention stage's loss; every token goes to KL
        Stage("logits", 1.0, 7e-4, "linear"),
    ],
    "pretrain": [  # next-token prediction, from scratch
        Stage("ce", 1.0, 1e-3, "cosine"),
    ],
    "hybrid": [  # starts near (KL 0.26 with a 64-token window); 1e-4 brought it no nearer, 2e-5 to 0.25 (10k tokens)
        Stage("logits", 1.0, 2e-5, "linear"),
    ],
}


def trainable(student, trains):
    """Set requires_grad by a stage's `trains` -> the names of what trains (a tied head: its embedding's)."""
    chosen = {"mixers": lambda n: ".mixer." in n, "blocks": lambda n: n.startswith("blocks."), "all": lambda n: True}
    kept = [i for i, name in enumerate(student.config.mixers) if name == "softmax"] if trains == "mixers" else []
    names = []
    for name, p in student.named_parameters():
        p.requires_grad_(chosen[trains](name) and not any(name.startswith(f"blocks.{i}.") for i in kept))
        if p.requires_grad:
            names.append(name)
    return names


# ------------------------------------------------------------------ calibration


@torch.no_grad()
def calibrate(student, teacher, tokens, *, ridges=(0.03, 0.1, 0.3, 1.0, 3.0)):
    """Before any step, from one batch, tokens (B ≥ 2, T): heads remember as far as the teacher's look, then W_o fits.

    Each head's scale is fitted to the teacher's head. The attention stage is least squares in W_o, so its optimum has a
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
        O = fit_scale(ours.mixer, before_projection(theirs.mixer, x), x)
        Y = y.cpu().double().flatten(0, 1)
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


def fit_scale(mixer, wanted, x):
    """Set each head's scale so that what W_o reads is nearest to wanted, (B T, H V); -> what it reads then.

    A window's part, which the scale does not touch, is subtracted first; one denominator for both has no such part.
    """
    if mixer.blend == "shared":
        return before_projection(mixer, x)
    parts = []
    for scale in (0.0, 1.0):
        mixer.scale.fill_(scale)
        parts.append(before_projection(mixer, x).unflatten(-1, (mixer.heads, -1)))
    rest, recalled = parts[0], parts[1] - parts[0]
    wanted = F.pad(wanted.unflatten(-1, (mixer.heads, -1)), (0, rest.size(-1) - wanted.size(-1) // mixer.heads))
    scale = (recalled * (wanted - rest)).sum((0, 2)) / recalled.square().sum((0, 2)).clamp(min=1e-30)
    mixer.scale.copy_(scale[:, None])
    return (rest + scale[:, None] * recalled).flatten(1)


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
