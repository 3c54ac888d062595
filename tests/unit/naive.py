"""What the ops should do, in plain loops and float64. Slow, and clear enough to be believed."""

from __future__ import annotations

import math

import torch

EMPTY = -1


def capped(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def attend(query, keys, values, scale, softcap=None):
    """One query over a list of keys and values: output and logsumexp."""
    if not keys:
        return torch.zeros(query.shape[0], dtype=torch.float64), -math.inf
    logits = capped(torch.stack(keys).double() @ query.double() * scale, softcap)
    lse = float(logits.logsumexp(0))
    return (logits - lse).exp() @ torch.stack(values).double(), lse


def paged_attention(queries, pool, slots, blocks, arena, arena_slots, arena_blocks, positions, scale, softcap=None):
    sequences, rows, query_heads, _ = queries.shape
    kv_heads, block_size = slots.shape[1], pool.shape[2]
    output = torch.zeros(queries.shape, dtype=torch.float64)
    lse = torch.full(queries.shape[:3], -math.inf, dtype=torch.float64)
    group = query_heads // kv_heads
    for s in range(sequences):
        for r in range(rows):
            for h in range(kv_heads):
                listed = [(pool, *pair) for pair in zip(slots[s, h].tolist(), blocks[s, h].tolist(), strict=True)]
                if arena is not None:
                    more = zip(arena_slots[s, h].tolist(), arena_blocks[s, h].tolist(), strict=True)
                    listed += [(arena, *pair) for pair in more]
                keys, values = [], []
                for memory, slot, block in listed:
                    for offset in range(block_size):
                        if block != EMPTY and block * block_size + offset <= int(positions[s, r]):
                            keys.append(memory[slot, 0, offset])
                            values.append(memory[slot, 1, offset])
                for q in range(h * group, (h + 1) * group):
                    output[s, r, q], lse[s, r, q] = attend(queries[s, r, q], keys, values, scale, softcap)
    return output, lse


def causal_attention(queries, keys, values, past, scale, softcap=None):
    """Full attention of `(rows, query_heads, head_dim)` over `(past + rows, kv_heads, head_dim)`."""
    rows, query_heads, head_dim = queries.shape
    group = query_heads // keys.shape[1]
    output = torch.zeros((rows, query_heads, head_dim), dtype=torch.float64)
    for r in range(rows):
        for q in range(query_heads):
            seen = past + r + 1
            weights = capped(keys[:seen, q // group].double() @ queries[r, q].double() * scale, softcap).softmax(0)
            output[r, q] = weights @ values[:seen, q // group].double()
    return output


def block_logits(queries, keys, scale, softcap=None):
    """`queries` `(S, R, Hq, D)`; `keys[s][n]` is `(H, B, D)` or `None` for a page that is padding."""
    sequences, rows, query_heads, _ = queries.shape
    num_blocks = max(len(blocks) for blocks in keys)
    result = torch.full((sequences, rows, query_heads, num_blocks), math.nan, dtype=torch.float64)
    for s in range(sequences):
        for r in range(rows):
            for q in range(query_heads):
                for n, block in enumerate(keys[s]):
                    if block is not None:
                        head = block[q // (query_heads // block.shape[0])].double()
                        result[s, r, q, n] = capped(head @ queries[s, r, q].double() * scale, softcap).logsumexp(0)
    return result


def block_mass(logits, num_blocks, kv_heads):
    sequences, rows, query_heads, blocks = logits.shape
    group = query_heads // kv_heads
    mass = torch.zeros((sequences, rows, kv_heads, blocks), dtype=torch.float64)
    for s in range(sequences):
        count = int(num_blocks[s])
        for r in range(rows):
            for q in range(query_heads):
                weights = [math.exp(float(logits[s, r, q, n])) for n in range(count)]
                for n in range(count):
                    mass[s, r, q // group, n] += weights[n] / sum(weights)
    return mass


def top_missing(mass, resident, low, high, count):
    """Per sequence and head, the list of `(block, mass)`, best first."""
    sequences, heads, blocks = mass.shape
    result = []
    for s in range(sequences):
        for h in range(heads):
            held = set(resident[s, h].tolist())
            free = [n for n in range(blocks) if low[s] <= n < high[s] and n not in held]
            free.sort(key=lambda n: -float(mass[s, h, n]))
            result.append([(n, float(mass[s, h, n])) for n in free[: min(count, blocks)]])
    return result


def select(mass, resident, selected_at, low, high, floor, step, max_new, pooled, margin, keep):
    """Blocks afterwards, what is kept of `resident`, stamps afterwards, `(S, H, C)` each; and the counts `(S, 2)`."""
    sequences, heads, blocks = mass.shape
    places = resident.shape[2]
    kept, after, stamps = resident.clone(), resident.clone(), selected_at.clone()
    counts = torch.zeros((sequences, 2), dtype=torch.int64)
    missing = top_missing(mass, resident, low, high, min(max_new, places))
    for s in range(sequences):
        swaps, least = [], float(floor[s])
        for h in range(heads):
            score = mass[s, h].tolist()
            candidates = sorted((score[n] for n in range(blocks) if low[s] <= n < high[s]), reverse=True)
            wanted = [value for value in candidates[:places] if value >= least]
            held = [score[n] if low[s] <= n < high[s] else -1.0 for n in resident[s, h].tolist()]
            enough = wanted[-1] if len(wanted) == places else max(least, 0.0)
            for place in range(places):
                if held[place] >= enough:
                    counts[s, 0] += 1
                    stamps[s, h, place] = step
                if least >= 0 and resident[s, h, place] >= 0 and held[place] < keep * least:
                    kept[s, h, place] = after[s, h, place] = EMPTY
            counts[s, 1] += len(wanted)
            empty = [block < 0 for block in resident[s, h].tolist()]
            worth = [least if none else value for none, value in zip(empty, held, strict=True)]
            worst = sorted(range(places), key=lambda place: (worth[place], int(stamps[s, h, place]), place))
            for place, (block, gain) in zip(worst, missing[s * heads + h], strict=False):
                replaces = not empty[place] and worth[place] >= 0
                if gain > max(least, 0.0) and (not replaces or gain > worth[place] + margin):
                    swaps.append((gain - max(worth[place], 0.0), h, place, block))
        for _, h, place, block in sorted(swaps, key=lambda swap: -swap[0])[:pooled]:
            kept[s, h, place], after[s, h, place] = EMPTY, block
            stamps[s, h, place] = step
    return after, kept, stamps, counts


def exchange_slots(slots, free, rows, kept, places):
    """`free` is a list of stacks. Returns the slots afterwards, the stacks, and the places that were served."""
    slots, free, served = slots.clone(), [list(stack) for stack in free], places.clone()
    for s, row in enumerate(rows.tolist()):
        for h in range(kept.shape[1]):
            for place in range(kept.shape[2]):
                if kept[s, h, place] < 0 and place not in places[s, h].tolist() and slots[row, h, place] >= 0:
                    free[row].append(int(slots[row, h, place]))
                    slots[row, h, place] = EMPTY
        for k in range(places.shape[2]):
            for h in range(places.shape[1]):
                place = int(places[s, h, k])
                if place >= 0 and slots[row, h, place] < 0:
                    if free[row]:
                        slots[row, h, place] = free[row].pop()
                    else:
                        served[s, h, k] = EMPTY
    return slots, free, served
