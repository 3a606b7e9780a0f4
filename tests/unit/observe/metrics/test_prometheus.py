"""What Prometheus reads, over HTTP."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from nereus_common.core.errors import InvalidInput, ResourceExhausted
from nereus_common.observe.metrics.page import MetricsPage, metrics_page
from nereus_common.observe.metrics.prometheus import JobMetrics

pytestmark = pytest.mark.fast

STEP = {"loss": 0.5, "tokens": 30.0, "seconds.generation": 2.0, "seconds.total": 3.0}
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(page: MetricsPage) -> Series:
    """Every sample by its name and labels."""

    def read() -> str:
        with urllib.request.urlopen(page.url_at(), timeout=5) as answer:
            return str(answer.read().decode())

    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(await asyncio.to_thread(read))
        for sample in family.samples
    }


async def test_a_running_job_is_on_the_page_and_an_ended_one_is_not() -> None:
    registry = CollectorRegistry()
    metrics = JobMetrics(registry)
    async with metrics_page("test", "127.0.0.1", 0, registry) as page:
        assert page is not None
        sink, other = metrics.of_job("a"), metrics.of_job("b")
        for step in range(2):
            sink.write(step, STEP, 100.0 + step)
        sink.write(2, {"checkpoint.step": 2.0}, 103.0)
        sink.write(2, {"transition.done": 1.0, "transition.seconds.move": 1.5}, 103.0)
        sink.write(2, {"transition.done": 0.0}, 103.0)
        other.write(0, {"loss": 9.0}, 100.0)
        found = await scrape(page)
        assert found["nereus_job_metric", (("job", "a"), ("name", "loss"))] == 0.5
        job = (("job", "a"),)
        assert found["nereus_job_steps_total", job] == 2
        assert found["nereus_job_tokens_total", job] == 60
        assert found["nereus_job_checkpoints_total", job] == 1
        assert found["nereus_job_step", job] == 2
        assert found["nereus_job_updated_seconds", job] == 103
        phase = (("job", "a"), ("phase", "generation"))
        assert (found["nereus_job_step_seconds_count", phase], found["nereus_job_step_seconds_sum", phase]) == (2, 4)
        moves = [found["nereus_job_transitions_total", (*job, ("outcome", one))] for one in ("done", "failed")]
        assert moves == [1, 1]
        assert found["nereus_job_transition_seconds_sum", (*job, ("phase", "move"))] == 1.5
        sink.close()
        left = await scrape(page)
        assert {dict(labels)["job"] for _, labels in left} == {"b"}


async def test_counters_stand_at_zero_before_anything_has_happened() -> None:
    registry = CollectorRegistry()
    JobMetrics(registry).of_job("a")
    async with metrics_page("test", "127.0.0.1", 0, registry) as page:
        assert page is not None
        found = await scrape(page)
        names = ("steps", "tokens", "checkpoints", "restarts")
        assert [found[f"nereus_job_{name}_total", (("job", "a"),)] for name in names] == [0, 0, 0, 0]


async def test_work_that_a_restart_repeats_is_counted_again() -> None:
    registry = CollectorRegistry()
    metrics = JobMetrics(registry)
    sink = metrics.of_job("a")
    sink.write(0, STEP, 1.0)
    sink.rewind(0, 2.0)
    sink.write(0, STEP, 3.0)
    assert registry.get_sample_value("nereus_job_restarts_total", {"job": "a"}) == 1
    assert registry.get_sample_value("nereus_job_steps_total", {"job": "a"}) == 2


async def test_the_page_is_gone_and_its_port_free_after_the_block() -> None:
    async with metrics_page("test", "127.0.0.1", 0, CollectorRegistry()) as page:
        assert page is not None
    with pytest.raises(urllib.error.URLError):
        await scrape(page)
    async with metrics_page("test", "127.0.0.1", page.port, CollectorRegistry()) as again:
        assert again is not None
        assert again.port == page.port


async def test_without_a_port_nothing_listens() -> None:
    async with metrics_page("test", "127.0.0.1", None) as page:
        assert page is None


async def test_a_taken_port_and_a_foreign_address_are_refused_by_name() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ResourceExhausted, match=f"controller: port {port}.*metrics_port"):
            async with metrics_page("controller", "127.0.0.1", port):
                pytest.fail("it started")
    with pytest.raises(InvalidInput, match=r"192\.0\.2\.1"):
        async with metrics_page("controller", "192.0.2.1", 0):
            pytest.fail("it started")


def test_the_address_of_a_page_is_what_others_reach_it_by() -> None:
    assert MetricsPage("::1", 90).url_at() == "http://[::1]:90/metrics"
    assert MetricsPage("0.0.0.0", 90).url_at("node7") == "http://node7:90/metrics"
