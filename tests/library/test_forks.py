"""Processes that were forked from one that has used the library."""

from __future__ import annotations

import json
import signal
import textwrap

import pytest

from tests.library.nodes import Job, run_program

_BEGINNING = """
import json, multiprocessing, os, sys, warnings
from rdzv_etcd.errors import ForkedProcessError
from rdzv_etcd.world.group import Group
from rdzv_etcd.settings.parse import settings_from_config

warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads, from Python 3.12 on

def make():
    return Group(settings_from_config(environ={}, **json.loads(sys.argv[1])))

def in_fork(work):
    child = os.fork()
    if child == 0:
        work()
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run(job: Job, program: str, nodes: str = "1") -> str:
    """Return what a program printed, after what all begin with."""
    options = json.dumps(job.options(nodes, lease_ttl=600))
    return run_program(_BEGINNING + textwrap.dedent(program), options)


def test_a_child_that_ends_says_nothing_and_leaves_the_parents_node_alone(job: Job) -> None:
    printed = run(
        job,
        """
        group = make()
        group.join()
        in_fork(lambda: None)
        in_fork(group.leave)
        in_fork(lambda: globals().pop("group"))
        print(group.waiting_count(), group.join().round)
        """,
    )
    assert printed.split() == ["0", "0", "0", "0", "2"]
    assert not job.left()


def test_a_child_is_refused_a_node_with_the_way_out_though_its_parents_has_left(job: Job) -> None:
    """What gRPC has set up in the parent would crash."""
    printed = run(
        job,
        """
        group = make()
        group.join()
        group.leave()

        def use():
            try:
                make()
            except ForkedProcessError as error:
                print("spawn" in str(error), str(error.parent) in str(error), flush=True)

        in_fork(use)
        child = multiprocessing.get_context("fork").Process(target=use)
        child.start()
        child.join()
        print(child.exitcode)
        """,
    )
    assert printed.split() == ["True", "True", "0"] * 2


def test_a_child_may_collect_garbage_though_its_parents_group_was_dropped(job: Job) -> None:
    """Where what gRPC has left would be freed, it would wait for a thread of the parent's."""
    printed = run(
        job,
        """
        import gc

        gc.disable()
        make().leave()
        in_fork(gc.collect)
        """,
    )
    assert printed.split() == ["0"]


def test_a_child_forked_before_the_first_use_is_a_node_of_its_own(job: Job) -> None:
    printed = run(
        job,
        """
        import rdzv_etcd.etcd.client

        def take_part():
            with make() as group:
                os.write(1, b"size %d\\n" % group.join().size)  # in one piece

        child = os.fork()
        take_part()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        "2",
    )
    assert sorted(printed.split()) == ["0", "2", "2", "size", "size"]


@pytest.mark.slow
def test_a_handler_and_a_store_in_a_child_tell_the_way_out(job: Job) -> None:
    printed = run(
        job,
        """
        import logging
        import torch.distributed as dist
        from torch.distributed.elastic.rendezvous import RendezvousError
        from rdzv_etcd.torch_plugin.handler import EtcdRendezvousHandler

        logging.disable()  # what torch is told is logged as well
        settings = settings_from_config(environ={}, **json.loads(sys.argv[1]))
        handler = EtcdRendezvousHandler(settings)
        store = handler.next_rendezvous().store

        def use():
            for work in (
                lambda: EtcdRendezvousHandler(settings),
                handler.next_rendezvous,
                lambda: store.get("key"),
                handler.num_nodes_waiting,
                handler.is_closed,
            ):
                try:
                    work()
                except (RendezvousError, dist.DistStoreError) as error:
                    print("spawn" in str(error), flush=True)
        in_fork(use)
        store.set("key", "value")
        print(store.get("key").decode())
        handler.shutdown()
        """,
    )
    assert printed.split() == [*["True"] * 5, "0", "value"]


ARGUMENTS = {
    "Group": {"fail": ("bad",), "when_left": (None,)},
    "World": {"barrier": ("b",), "exchange": (b"v",)},
    "RoundStore": {
        **dict.fromkeys(("get", "delete"), ("k",)),
        **dict.fromkeys(("set", "append"), ("k", b"v")),
        **dict.fromkeys(("multi_get", "wait", "check"), (["k"],)),
        **{"multi_set": ({"k": b"v"},), "add": ("k", 1), "compare_set": ("k", b"", b"v")},
        "keep": (None,),
    },
    "Observer": {},
    "JobEvents": {},
}
FACTS = {
    "Group": {"job", "node_id"},
    "World": {"rank", "size", "epoch", "round", "master", "members", "node_ids", "store"},
    "RoundStore": set[str](),
    "Observer": {"job"},
    "JobEvents": set[str](),
}
"""What stays as the parent knew it: it never changes. ``members`` only if the parent has read them;
``store`` is only a way to it."""
_ENDED = {
    "Group": {"has_left": "True", "leave": "None"},
    "World": {
        "over": "True",
        "change": "MovedOn(because='')",
        "should_yield": "True",
        "wait_over": "True",
    },
    "RoundStore": {"keep": "None"},
    "Observer": {"close": "None"},
    "JobEvents": {"is_closed": "True", "close": "None"},
}
"""What says that there is nothing for a child to take part in, or has nothing to do there."""

_EVERYTHING = """
import inspect, logging
logging.disable()
import rdzv_etcd
from rdzv_etcd import aio

from tests.library.test_forks import ARGUMENTS, FACTS

options = json.loads(sys.argv[1])

def use(thing, name):
    try:
        found = getattr(thing, name)
        if callable(found):
            found = found(*ARGUMENTS[type(thing).__name__].get(name, ()))
        if inspect.iscoroutine(found):
            found = found.send(None)
        elif inspect.isasyncgen(found):
            found = found.asend(None).send(None)
        elif inspect.isgenerator(found):
            found = next(found)
        elif isinstance(found, aio.JobEvents):  # it begins when it is first asked
            found = found.next().send(None)
        return repr(found)
    except StopIteration as end:
        return repr(end.value)
    except ForkedProcessError:
        return "refused"
    except Exception as error:
        return repr(error)

def use_all(things):
    told = {}
    for thing in things:
        names = sorted(name for name in dir(thing) if not name.startswith("_"))
        for name in sorted(names, key=lambda name: name in ("leave", "close")):
            key = f"{type(thing).__module__} {type(thing).__name__} {name}"
            told[key] = use(thing, name)
            if name in FACTS[type(thing).__name__]:
                told[key] = "a fact" if told[key] == known.get(key, told[key]) else told[key]
    print(json.dumps(told), flush=True)
    os._exit(0)

group = make()
world = group.join()
observer = rdzv_etcd.observe(options["endpoint"], job=options["job_id"])
events = observer.events()
world.members, group.drain("soon")
while group.drain_reason is None:
    pass
plain = [world.store, events, observer, world, group]
twin = aio.Group(group)
its_world = aio.World(twin, world._part, world._seat)
twins = [its_world.store, twin.events(), aio.Observer(observer), its_world, twin]
known = {}
for thing in plain:
    for name in FACTS[type(thing).__name__]:
        known[f"{type(thing).__module__} {type(thing).__name__} {name}"] = use(thing, name)

for things in (plain, twins):
    in_fork(lambda: use_all(things))
print(world.over, type(events.next(60)).__name__, observer.state().stage.value)
observer.close(), group.leave()
"""


@pytest.mark.slow
def test_a_child_of_an_agent_does_not_handle_its_drain_signal(job: Job) -> None:
    """It has inherited the handler, but no node that could be drained: the signal ends it."""
    printed = run(
        job,
        """
        import logging, signal
        from rdzv_etcd.torch_plugin.handler import EtcdRendezvousHandler

        logging.disable()
        handler = EtcdRendezvousHandler(
            settings_from_config(environ={}, **json.loads(sys.argv[1])))
        handler.next_rendezvous()
        in_fork(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        print(handler.num_nodes_waiting())
        handler.shutdown()
        """,
    )
    assert printed.split() == [str(-signal.SIGUSR1), "0"]


def test_everything_that_is_public_is_refused_in_a_child_or_known_to_be_no_lie(job: Job) -> None:
    """Every public name of every object, found by looking: a new one is refused, or stands in one
    of the tables above."""
    lines = run(job, _EVERYTHING).splitlines()
    blocking, twins = json.loads(lines[0]), json.loads(lines[2])
    assert (lines[1], lines[3]) == ("0", "0")
    assert lines[4] == "False Snapshot working"  # the parent's are as they were
    for told in (blocking, twins):
        assert len(told) > 40
        lies = {}
        for key, outcome in told.items():
            _, kind, name = key.split()
            is_fact = name in FACTS[kind]
            expected = "a fact" if is_fact else _ENDED[kind].get(name, "refused")
            if outcome != expected and not (is_fact and outcome == "refused"):
                lies[key] = outcome
        assert lies == {}
