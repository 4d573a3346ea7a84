"""The online family as loops over sequences and tokens in float64 numpy, written from the formulas alone. It imports
nothing of the package, so that a mistake is not repeated.

A batch is a list of sequences, each a dict with group, reward and, per token, lists: mask, logp, old, ref, rollout,
entropy, value, kl (exact); an episode's `longest` is the length of its longest segment. `terms` of a loss are weights
times means over a mini-batch.
"""

import math

import numpy as np

NAMES = ("ppo", "grpo", "dr_grpo", "gspo", "dapo", "cispo", "rloo")
NAMES += ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


def groups_of(batch: list[dict]) -> dict[int, list[dict]]:
    found: dict[int, list[dict]] = {}
    for sequence in batch:
        found.setdefault(sequence["group"], []).append(sequence)
    return found


def penalty(sequence: dict, t: int, o: dict) -> float:
    """The KL penalty on the reward of token t."""
    if not o["kl_coefficient"] or o["kl_in"] != "reward":
        return 0.0
    return o["kl_coefficient"] * estimate(o["kl_estimator"], sequence["old"][t], sequence["ref"][t], sequence["kl"][t])


def estimate(kind: str, logp: float, ref: float, exact: float) -> float:
    if kind == "k1":
        return logp - ref
    if kind == "k2":
        return (logp - ref) ** 2 / 2
    if kind == "k3":
        difference = min(max(ref - logp, -20.0), 20.0)
        return min(math.exp(difference) - difference - 1, 10.0)
    return exact


def own(sequence: dict) -> list[int]:
    return [t for t, m in enumerate(sequence["mask"]) if m]


def shaped(sequence: dict, o: dict) -> float:
    """The reward of a whole response less the length penalty."""
    reward = sequence["reward"]
    if o.get("overlong_buffer"):
        start = o["max_response_tokens"] - o["overlong_buffer"]
        length = sequence.get("longest", len(sequence["mask"]))
        if length > start:
            reward -= o["overlong_coefficient"] * min(1.0, (length - start) / o["overlong_buffer"])
    return reward


def advantages(batch: list[dict], name: str, o: dict) -> list[list[float]]:
    """Advantages per sequence and token; arbitrary values for tokens with mask 0."""
    if name in ("ppo", "reinforce_plus_plus"):
        return whitened(batch, [token_credit(s, o, name) for s in batch], o.get("whiten_advantages", True))
    per_sequence = {}
    for members in groups_of(batch).values():
        pure = [shaped(s, o) for s in members]
        costs = [sum(penalty(s, t, o) for t in own(s)) for s in members]
        mean = sum(pure) / len(pure)
        std = math.sqrt(sum((r - mean) ** 2 for r in pure) / len(pure))
        for i, s in enumerate(members):
            rest = [pure[j] - costs[j] for j in range(len(members)) if j != i]
            cost = costs[i] - sum(costs) / len(costs)
            if name == "rloo":
                value = pure[i] - costs[i] - sum(rest) / len(rest) if rest else 0.0
            elif name in ("dr_grpo", "reinforce_plus_plus_baseline"):
                value = pure[i] - mean - cost
            else:  # the penalty is not divided by the deviation
                value = ((pure[i] - mean) / std if max(pure) > min(pure) else 0.0) - cost
            if o.get("filter_groups") and len({other["reward"] for other in members}) == 1:
                value = 0.0  # of DAPO's equal groups penalties and shaping are all that differs
            per_sequence[id(s)] = value
    spread = [[per_sequence[id(s)]] * len(s["mask"]) for s in batch]
    return whitened(batch, spread, True) if name == "reinforce_plus_plus_baseline" else spread


def token_credit(sequence: dict, o: dict, name: str) -> list[float]:
    """Generalised advantages by their definition, a sum over all later tokens; REINFORCE++ has neither V nor lambda."""
    places = own(sequence)
    values = [sequence["value"][t] if name == "ppo" else 0.0 for t in places] + [0.0]
    gamma, lam = o["gamma"], o["lam"] if name == "ppo" else 1.0
    rewards = [-penalty(sequence, t, o) for t in places]
    if rewards:
        rewards[-1] += sequence["reward"]
    deltas = [rewards[i] + gamma * values[i + 1] - values[i] for i in range(len(places))]
    credit = [0.0] * len(sequence["mask"])
    for i, t in enumerate(places):
        credit[t] = sum((gamma * lam) ** (k - i) * deltas[k] for k in range(i, len(places)))
    return credit


def whitened(batch: list[dict], credit: list[list[float]], really: bool) -> list[list[float]]:
    if not really:
        return credit
    flat = np.array([c[t] for s, c in zip(batch, credit, strict=True) for t in own(s)], dtype=np.float64)
    if len(flat) == 0 or flat.max() == flat.min():
        return [[0.0] * len(c) for c in credit]
    return [[(v - flat.mean()) / flat.std() for v in c] for c in credit]


def surrogate(sequence: dict, credit: list[float], name: str, o: dict) -> list[float]:
    """The term of each token."""
    terms = [0.0] * len(sequence["mask"])
    logs = [sequence["logp"][t] - sequence["old"][t] for t in range(len(terms))]
    mean_log = sum(logs[t] for t in own(sequence)) / max(len(own(sequence)), 1)
    for t in own(sequence):
        a = credit[t]
        if o["importance"] != "none":
            w = math.exp(sequence["old"][t] - sequence["rollout"][t])
            cap = o["importance_cap"]
            a *= min(w, cap) if o["importance"] == "truncated" else (w if 1 / cap <= w <= cap else 0.0)
        r = math.exp(mean_log if name == "gspo" else logs[t])
        clipped = min(max(r, 1 - o["clip_low"]), 1 + o["clip_high"])
        if name == "cispo":
            terms[t] = -clipped * a * sequence["logp"][t]
            continue
        value = min(r * a, clipped * a)
        if o["dual_clip"] and a < 0:
            value = max(value, o["dual_clip"] * a)
        terms[t] = -value
    return terms


def mean(batch: list[dict], values: list[list[float]], how: str, limit: int) -> float:
    """Means over the mini-batch; a sequence without a token with mask 1 does not count."""
    rows = [(s, [v[t] for t in own(s)]) for s, v in zip(batch, values, strict=True) if own(s)]
    if not rows:
        return 0.0
    if how == "token_mean":
        return sum(sum(v) for _, v in rows) / sum(len(v) for _, v in rows)
    if how == "sequence_mean":
        return sum(sum(v) / len(v) for _, v in rows) / len(rows)
    if how == "sequence_sum":
        return sum(sum(v) for _, v in rows) / len(rows)
    if how == "constant":
        return sum(sum(v) / limit for _, v in rows) / len(rows)
    by_group: dict[int, list[float]] = {}
    for s, v in rows:
        by_group.setdefault(s["group"], []).extend(v)
    return sum(sum(v) / len(v) for v in by_group.values()) / len(by_group)


def policy_loss(batch: list[dict], name: str, o: dict) -> float:
    """The loss of the batch as one mini-batch."""
    credit = advantages(batch, name, o)

    def total(values: list[list[float]]) -> float:
        return mean(batch, values, o["aggregation"], o["max_response_tokens"])

    loss = total([surrogate(s, c, name, o) for s, c in zip(batch, credit, strict=True)])
    if o["kl_coefficient"] and o["kl_in"] == "loss":
        each = [
            [estimate(o["kl_estimator"], *x) for x in zip(s["logp"], s["ref"], s["kl"], strict=True)] for s in batch
        ]
        loss += o["kl_coefficient"] * total(each)
    return loss - o["entropy_coefficient"] * total([s["entropy"] for s in batch])


def value_loss(batch: list[dict], new_values: list[list[float]], o: dict) -> float:
    terms = []
    for s, new in zip(batch, new_values, strict=True):
        credit = token_credit(s, o, "ppo")
        row = [0.0] * len(new)
        for t in own(s):
            target = credit[t] + s["value"][t]
            bounded = min(max(new[t], s["value"][t] - o["value_clip"]), s["value"][t] + o["value_clip"])
            row[t] = 0.5 * max((new[t] - target) ** 2, (bounded - target) ** 2)
        terms.append(row)
    return mean(batch, terms, "token_mean", 1)
