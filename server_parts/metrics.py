"""Prometheus metrics, named as vLLM names its own with `samebits:` in front.

Gauges and counters that the engine keeps anyway are read when they are asked for; the rest is observed as requests end.
"""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from engine import LLM, RequestOutput

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """One registry a server, so that two can live in one process. Thread-safe. Times are in seconds."""

    def __init__(self, llm: LLM, model_name: str):
        self.registry = CollectorRegistry()
        self._llm, self._model_name = llm, model_name

        def make(kind, name: str, text: str, label: str | None = None, **options):
            """A metric of this model; with `label`, a function of that label's value."""
            labels = ("model_name",) if label is None else ("model_name", label)
            metric = kind(f"samebits:{name}", text, labels, registry=self.registry, **options)
            return metric.labels(model_name) if label is None else partial(metric.labels, model_name)

        self.prompt_tokens = make(Counter, "prompt_tokens", "Prompt tokens of ended requests.")
        self.generation_tokens = make(Counter, "generation_tokens", "Tokens generated for ended requests.")
        self.prefix_queries = make(Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = make(Counter, "prefix_cache_hits", "Prompt tokens found there.")
        self.ended = make(Counter, "request_success", "Completions, by how they ended.", "finished_reason")
        self.rejected = make(Counter, "requests_rejected", "Requests turned away.", "reason")
        self.failed_steps = make(Counter, "failed_steps", "Engine steps that raised.")
        self.ttft = make(Histogram, "time_to_first_token_seconds", "From the engine's queue to a first token.",
                         buckets=LONG)
        self.tpot = make(Histogram, "request_time_per_output_token_seconds", "Mean time a token after the first.",
                         buckets=SHORT)
        self.latency = make(Histogram, "e2e_request_latency_seconds", "From the engine's queue to the end.",
                            buckets=LONG)
        self.registry.register(self)

    def observe(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
        self.prompt_tokens.inc(len(output.prompt_token_ids))
        self.prefix_queries.inc(len(output.prompt_token_ids))
        self.prefix_hits.inc(output.num_cached_tokens)
        for out in output.outputs:
            self.generation_tokens.inc(len(out.token_ids))
            self.ended(out.finish_reason).inc()
        total, ttft = output.timings["total_s"], output.timings.get("ttft_s")
        self.latency.observe(total)
        if ttft is not None:
            self.ttft.observe(ttft)
            if (count := max(len(out.token_ids) for out in output.outputs)) > 1:
                self.tpot.observe((total - ttft) / (count - 1))

    def collect(self):
        """What the scheduler knows, read without a lock: each value is one Python object."""
        scheduler = self._llm.scheduler
        blocks = scheduler.blocks
        for family, name, text, value in (
            (GaugeMetricFamily, "num_requests_running", "Completions in the running batch.", len(scheduler.running)),
            (GaugeMetricFamily, "num_requests_waiting", "Completions waiting for a place.", len(scheduler.waiting)),
            (GaugeMetricFamily, "kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1.",
             1 - len(blocks.free) / blocks.num_blocks),
            (CounterMetricFamily, "num_preemptions", "Preemptions so far.", scheduler.num_preemptions),
        ):
            metric = family(f"samebits:{name}", text, labels=["model_name"])
            metric.add_metric([self._model_name], value)
            yield metric

    def text(self) -> bytes:
        return generate_latest(self.registry)
