"""Stages and recipes: what a student is asked to match, in which order, and what may change meanwhile.

A stage is a function (student, teacher, tokens, backward=None, **options) -> dict of mean losses per token. Each loss
but `ce` is exactly 0 for student = teacher. Without `backward`, dict["loss"] carries the graph. With backward=(a
function of a scalar) a stage hands over each layer's or block of tokens' share as soon as it exists, so that memory
grows neither with depth (attention, hidden) nor with tokens × vocabulary (logits, ce), and the dict holds numbers.

A recipe is a row of data: its stages in order. A new stage is a function here and an entry in STAGES.
Nothing here steps an optimizer, reads a file or prints.
"""

import dataclasses

import torch
import torch.nn.functional as F

# ------------------------------------------------------------------ stages


def attention(student, teacher, tokens, backward=None):
    """Mixer output against the teacher's attention output, both after W_o, its hidden states in; mixers train.

    Mean over layers of ‖y_student − y_teacher‖² / ‖y_teacher‖² (2504.14366 stage 1; LoLCATs 2410.10254 eq. 6; the
    division makes layers and teachers comparable: 1 is as good as an output of 0).
    """
    losses = []
    for ours, x, y, _, _ in layers(teacher, student, tokens):
        error = (ours.mixer(x)[0] - y).square().sum() / y.square().sum()
        losses.append(share(error / len(teacher.blocks), backward))
    return {"loss": sum(losses), "attention": sum(losses)}


def hidden(student, teacher, tokens, backward=None):
    """Block output against the teacher's next hidden state, its hidden states in; whole blocks train.

    Mean over layers and tokens of ‖Block(h) − h_next‖₂ / rms ‖h_next‖₂ (MOHAWK 2408.10189 eq. 5; 2504.14366 stage 2).
    """
    losses = []
    for ours, _, _, h, after in layers(teacher, student, tokens):
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
    for rows in torch.arange(len(h), device=h.device).split(block):
        with torch.no_grad():
            wanted = teacher.head(target[rows]) if kl else None
        weights = kl / len(h), ce / len(h)
        loss, *both = Divergence.apply(student.head(leaf[rows]), wanted, following[rows], *weights, temperature)
        total = total + share(loss, backward)
        sums = {name: sums[name] + value / len(h) for name, value in zip(sums, both)}
    if leaf is not h:
        h.backward(leaf.grad)
    return {"loss": total} | sums


class Divergence(torch.autograd.Function):
    """kl · temperature² KL(teacher ‖ student) + ce · CE, summed over rows, and both sums apart (no gradient).

    logits, wanted (the teacher's, or None) (n, vocab), following (n,). Derived by hand, since autograd would pass over
    the vocabulary twice as often: with p and t the softmax of both, dKL/dlogits = (p − t) / temperature and
    dCE/dlogits = p − onehot. Only the distribution of temperature 1 has a CE; at another it counts 0.
    """

    @staticmethod
    def forward(ctx, logits, wanted, following, kl, ce, temperature):
        log_p, ce = log_softmax(logits, temperature), ce * (temperature == 1)
        far = log_p.new_zeros(())
        nll = -log_p.gather(-1, following[:, None]).sum() * (temperature == 1)
        if wanted is not None:
            log_t = log_softmax(wanted, temperature)
            t = log_t.exp()
            far = (torch.dot(t.flatten(), log_t.flatten()) - torch.dot(t.flatten(), log_p.flatten())) * temperature**2
        if ctx.needs_input_grad[0]:
            grad = log_p.exp_().mul_(kl * temperature + ce)
            if wanted is not None:
                grad.sub_(t, alpha=kl * temperature)
            grad[torch.arange(len(grad)), following] -= ce
            ctx.save_for_backward(grad.to(logits.dtype))
        ctx.mark_non_differentiable(far, nll)
        return kl * far + ce * nll, far, nll

    @staticmethod
    def backward(ctx, by_loss, *_):
        return ctx.saved_tensors[0] * by_loss.to(ctx.saved_tensors[0].dtype), None, None, None, None, None


def log_softmax(logits, temperature):
    """In float32 at least: bf16 logits near 20 are 0.1 apart."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.log_softmax(logits if temperature == 1 else logits / temperature, -1, dtype=dtype)


def ce(student, teacher, tokens, backward=None, *, block=512):
    """Next-token cross-entropy alone; the teacher is not asked (SUPRA 2405.06640, T2R 2103.13076)."""
    losses = logits(student, teacher, tokens, backward, kl=0.0, ce=1.0, block=block)
    return {"loss": losses["loss"], "ce": losses["ce"]}


STAGES = {"attention": attention, "hidden": hidden, "logits": logits, "ce": ce}


def layers(teacher, student, tokens):
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
    """Hand a share of the loss to `backward` at once and keep its number, or keep its graph."""
    if backward is None or not loss.requires_grad:
        return loss if backward is None else loss.detach()
    backward(loss)
    return loss.detach()


# ------------------------------------------------------------------ recipes


@dataclasses.dataclass
class Stage:
    """One row of a recipe: which loss, its share of the tokens, its learning rate and schedule, and what trains.

    trains: "mixers" | "blocks" | "all".
    schedule: "wsd" (flat, then down to 0 over the last fifth) | "cosine" (to a tenth) | "linear" (to 0).
    """

    loss: str
    tokens: float
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
    "default": [  # after `calibrate`, which is the attention stage's optimum in W_o; every token goes to KL
        Stage("logits", 1.0, 7e-4, "linear"),
    ],
    "hybrid": [  # starts so near (KL 0.2 with a 64-token window) that a large rate only leads away
        Stage("logits", 1.0, 1e-4, "linear"),
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
def calibrate(student, teacher, tokens, *, ridge=0.1):
    """Before any step: solve every layer's W_o so that the mixer's output is nearest to the teacher's attention output.

    The attention stage is least squares in W_o, so one batch, tokens (B, T), gives its optimum:
    W = (YᵀO + λW₀)(OᵀO + λI)⁻¹, O what W_o reads, Y the attention output, both from the teacher's hidden states, W₀ the
    teacher's W_o, λ = ridge · mean diagonal of OᵀO. (The student's own hidden states in their place were worse.)
    """
    for ours, x, y, _, _ in layers(teacher, student, tokens):
        seen = []
        hook = ours.mixer.o.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        ours.mixer(x)
        hook.remove()
        with torch.autocast(x.device.type, enabled=False):
            O, Y, W0 = (z.double().flatten(0, -2) for z in (seen[0], y, ours.mixer.o.weight))
            gram = O.T @ O
            damp = ridge * gram.diagonal().mean()
            gram.diagonal().add_(damp)
            ours.mixer.o.weight.copy_(torch.linalg.solve(gram, O.T @ Y + damp * W0.T).T)
    torch.clear_autocast_cache()  # it may hold the weights from before
