"""A spool that is damaged while the relay runs: it says so everywhere, takes no mail, and sends the rest."""

from pathlib import Path

from tests.store.builders import flip
from tests.support.crew import QUICK, run, status
from tests.support.ports import free_port
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from tests.support.submit import Submitter, tokens


def test_damage_met_while_running_is_told_everywhere_and_the_rest_is_sent(tmp_path: Path, sink: Sink) -> None:
    spool = tmp_path / "relay" / "spool"
    port = free_port()
    relay = RelayProcess(
        tmp_path / "relay",
        next_hop=f"127.0.0.1:{port}",
        spool={"path": str(spool), "write_buffer": "1 MB"},
        tables=QUICK,
    )
    with relay:
        client = Submitter(relay.smtp_port, prefix="queued", size=20_000)
        client.send(4, 40)
        assert len(client.acknowledged) == 40
        relay.restart()  # LevelDB puts into tables what its log holds
        relay.kill()  # what was tried already, in vain, is in memory
        for table in spool.glob("*.ldb"):
            # The last body: the first one shares its block with the deliveries, which stand before it.
            if (at := table.read_bytes().rfind(client.body[3000:3100])) >= 0:
                flip(table, at)
        relay.start(statuses=(200, 503))
        with Sink(port=port) as back:
            relay.wait_for(lambda: relay.http("/readyz")[0] == 503, what="/readyz 503")
            assert "the spool is damaged" in relay.http("/readyz")[1]
            late = Submitter(relay.smtp_port, prefix="late")
            late.send(1, 1)
            assert set(late.replies) == {b"451 4.3.0"}
            assert relay.metric("zonerelay_store_usable", worker="0") == 0
            assert relay.metric("zonerelay_store_damage_total") >= 1
            (told, *_) = relay.events("store-damaged")
            assert told["detail"] == "LevelDB: Corruption: block checksum mismatch"
            assert [event["reason"] for event in relay.events("store-unhealthy")] == ["the spool is damaged"]
            (problem, *_) = status(relay).problems
            assert f"the spool {spool} is damaged (LevelDB: Corruption:" in problem
            listed = run(relay, "queue", "list")
            assert listed.returncode == 1
            assert "Missing in this answer: unreadable records" in listed.stderr
            assert "b'" not in listed.stdout + listed.stderr
            relay.wait_for(lambda: len(tokens(back.messages)) == 39, what="all but the damaged one")
            relay.wait_for(
                lambda: relay.metric("zonerelay_queue_deliveries", zone="default", state="deferred") == 1,
                what="the damaged one stays",
            )
            assert max(tokens(back.messages).values()) == 1


def test_hole_in_the_log_is_a_problem_until_an_operator_acknowledges_it(tmp_path: Path) -> None:
    relay = RelayProcess(tmp_path / "relay", next_hop=f"127.0.0.1:{free_port()}", tables=QUICK)
    with relay:
        client = Submitter(relay.smtp_port, prefix="queued", size=4000)
        client.send(2, 20)
        assert len(client.acknowledged) == 20
        relay.kill()
        log = max(relay.spool.glob("*.log"))
        flip(log, log.read_bytes().find(client.body[1000:1100]))
        relay.start()
        assert relay.http("/readyz")[0] == 200, "what was lost does not come back by refusing more"
        (problem,) = status(relay).problems
        assert "they refer to" in problem, "what was written together is lost together"
        (told,) = relay.events("store-damaged")
        assert "the spool lost data" in told["detail"]
        identity = problem.rpartition(" ")[2]
        refused = run(relay, "spool", "acknowledge", "00000000")
        assert refused.returncode == 1
        assert "no reported loss 00000000" in refused.stderr
        done = run(relay, "spool", "acknowledge", identity)
        assert done.stdout == f"{identity}: acknowledged\n"
        assert status(relay).problems == ()
        relay.restart()
        assert status(relay).problems == ()
