"""What a result file says, in one sentence: the titles of the pictures.

Pure: computes from the samples, so that a title stays true when the figures change. Knows the
results' layout; draws nothing. Figures are medians, as in the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import results

OURS, IN_PROCESS, BARE, NO_BACKEND = "etcd3", "etcd3 in process", "bare", "none"
"""Names in result files; whatever else was measured is torch's."""
KILLS = ("member", "rank0", "leader", "store-host")
"""Cases of ``recovery``."""
FIRST_ROUND = "first round"
LOSSES = ("one lost", "leader lost", "10 % lost")
"""Phases of ``scale``."""
MOST_MEMORY = "idle"
STORES = {
    "EtcdStore": "our EtcdStore",
    "torch EtcdStore": "torch's EtcdStore",
    "TCPStore": "TCPStore (in memory)",
}
"""What people call the stores."""

Sample = Mapping[str, Any]
Document = Mapping[str, Any]


def grouped(samples: Iterable[Sample], *names: str) -> dict[tuple[Any, ...], list[Sample]]:
    """Return the samples by what they say under ``names``, in the order of the file."""
    groups: dict[tuple[Any, ...], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample.get(name) for name in names), []).append(sample)
    return groups


def medians(samples: Iterable[Sample], value: str, *names: str) -> dict[tuple[Any, ...], float]:
    """Return the median of ``value``, a number or a list of them, of the samples that have it."""
    found = {}
    for key, group in grouped(samples, *names).items():
        values: list[float] = []
        for sample in group:
            if "failed" not in sample and value in sample:
                seen = sample[value]
                values += seen if isinstance(seen, list) else [seen]
        if values:
            found[key] = results.statistics(values)["median"]
    return found


def latency(document: Document) -> str:
    rounds = medians(document["results"], "seconds", "nodes", "backend")
    torchs = {
        nodes: {name: s for (n, name), s in rounds.items() if n == nodes and _is_torchs(name)}
        for nodes, name in rounds
        if name == OURS
    }
    if not torchs:
        return "How long nodes take to form a world"
    nodes = max(torchs, key=lambda n: (bool(torchs[n]), n))
    ours = f"etcd3 forms a world of {nodes} nodes in {results.seconds(rounds[nodes, OURS])}"
    if not torchs[nodes]:
        return ours
    fastest = min(torchs[nodes], key=torchs[nodes].__getitem__)
    took = results.seconds(torchs[nodes][fastest])
    return f"{ours}, torch's fastest backend ({fastest}) in {took}"


def peers(document: Document) -> str:
    rounds = medians(document["results"], "seconds", "nodes", "backend")
    nodes = max((nodes for nodes, system in rounds if system == OURS), default=None)
    if nodes is None:
        return "How long the nodes of different systems take to meet"
    told = [
        f"{results.seconds(took)} with {system}"
        for (size, system), took in sorted(rounds.items(), key=lambda item: item[1])
        if size == nodes and system != BARE
    ]
    return f"{nodes} nodes meet within {', '.join(told)}"


def recovery(document: Document) -> str:
    """Of kills, if there were any; a backend's range is over the cases."""
    samples: Sequence[Sample] = document["results"]
    kills = [sample for sample in samples if sample["case"] in KILLS]
    event = "After a kill" if kills else "After a fault"
    parts = [
        part
        for words, chosen in (
            ("{} with etcd3", OURS.__eq__),
            ("{} in process", IN_PROCESS.__eq__),
            ("{} with torch's backends", _is_torchs),
        )
        if (part := _recovered(words, [s for s in kills or samples if chosen(s["backend"])]))
    ]
    return f"{event}, training continues {_listed(parts)}" if parts else "Nothing was measured"


def _recovered(words: str, samples: Sequence[Sample]) -> str:
    """Say how long it took, and how often it did not come to that."""
    totals = medians(samples, "total", "case", "backend").values()
    failed = sum("failed" in sample for sample in samples)
    if not totals:
        return words.format("never") if samples else ""
    text = words.format(f"after {between(totals)}")
    return f"{text} ({failed} of {len(samples)} runs did not recover)" if failed else text


def scale(document: Document) -> str:
    times = medians(document["results"], "seconds", "kind", "phase", "nodes")
    sizes = [n for kind, phase, n in times if (kind, phase) == (OURS, FIRST_ROUND)]
    if not sizes:
        return "How long many nodes take to form a world"
    nodes = max(sizes)
    text = f"{nodes:,} nodes form a world in {results.seconds(times[OURS, FIRST_ROUND, nodes])}"
    bare = times.get((BARE, FIRST_ROUND, nodes))
    if bare is not None:
        text += f" (bare calls to etcd: {results.seconds(bare)})"
    losses = [times[OURS, p, nodes] for p in LOSSES if (OURS, p, nodes) in times]
    return f"{text}, and the next one after losses in {between(losses)}" if losses else text


def store(document: Document) -> str:
    """Of the greatest number of agents that all stores have got through, or else of most."""
    samples = [s for s in document["results"] if s.get("operation") == "exchange"]
    times = medians(samples, "seconds", "agents", "store")
    if not times:
        return "What the stores' calls take"
    counts = {agents: sum(a == agents for a, _ in times) for agents, _ in times}
    agents = max(counts, key=lambda a: (counts[a], a))
    took = [
        f"{results.seconds(seconds)} on {STORES.get(name, name)}"
        for (count, name), seconds in times.items()
        if count == agents
    ]
    return f"{agents:,} agents exchange their ranks in {_listed(took)}"


def agent(document: Document) -> str:
    added = {b: stages[MOST_MEMORY] for b, stages in memory(document).items() if b != NO_BACKEND}
    if not added:
        return "What a backend costs in the agent"
    parts = [f"{results.number(mb)} MB more with {backend}" for backend, mb in added.items()]
    return f"An idle agent takes {_listed(parts)}"


def memory(document: Document) -> dict[str, dict[str, float]]:
    """Return how many MB the agents have at each stage beyond torchrun's imports, per backend."""
    found: dict[str, dict[str, list[float]]] = {}
    for sample in document["results"]:
        for process in sample.get("processes", []):
            for stage, seen in process.items():
                if stage != "before" and isinstance(seen, dict) and "rss_mb" in seen:
                    stages = found.setdefault(sample["backend"], {})
                    added = seen["rss_mb"] - process["before"]["rss_mb"]
                    stages.setdefault(stage, []).append(added)
    return {
        backend: {stage: results.statistics(mb)["median"] for stage, mb in stages.items()}
        for backend, stages in found.items()
    }


def gpu(document: Document) -> str:
    where = "" if any(s["device"] == "cuda" for s in document["results"]) else "Dry run on a CPU, "
    killed = gpu_times(document, "after_kill", "total")
    times, event = (killed, "a kill costs") if killed else (_launches(document), "launching takes")
    if not times:
        return f"{where}no run got to the first allreduce"
    nodes, workers = max((nodes, workers) for nodes, workers, _ in times)
    here = {b: took for (n, w, b), took in times.items() if (n, w) == (nodes, workers)}
    torchs = [took for backend, took in here.items() if _is_torchs(backend)]
    parts = [f"{results.seconds(here[OURS])} with etcd3"] if OURS in here else []
    parts += [f"{between(torchs)} with torch's backends"] if torchs else []
    return f"{where}{sized(nodes, workers)}: {event} {_listed(parts)}"


def sized(nodes: int, workers: int) -> str:
    """Write how large a job is."""
    return f"{_many(nodes, 'node')} × {_many(workers, 'worker')}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _launches(document: Document) -> dict[tuple[Any, ...], float]:
    return gpu_times(document, "launch", "first_allreduce")


def gpu_times(document: Document, part: str, name: str) -> dict[tuple[Any, ...], float]:
    """Return the medians per nodes, workers and backend."""
    flat = [
        {**sample, "seconds": sample[part][name]}
        for sample in document["results"]
        if name in sample.get(part, {})
    ]
    return medians(flat, "seconds", "nodes", "workers", "backend")


def between(seconds: Iterable[float]) -> str:
    """Write the shortest and the longest, or one if they look the same."""
    found = sorted(seconds)
    first, last = results.seconds(found[0]), results.seconds(found[-1])
    if first == last:
        return first
    number, _, unit = first.partition(" ")
    return f"{number}–{last}" if last.endswith(f" {unit}") else f"{first} to {last}"


def _is_torchs(backend: str) -> bool:
    return backend not in (OURS, IN_PROCESS, BARE, NO_BACKEND)


def _listed(parts: Sequence[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
