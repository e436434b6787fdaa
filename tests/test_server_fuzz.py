"""Schemathesis against the served OpenAPI schema: whatever is sent, the server neither fails nor falls silent."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from test_server import assert_all_given_back, serve

from engine import LLM

VALID, INVALID = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
CASES = [(f"/v1/{name}", mode) for name in ("completions", "chat/completions") for mode in (VALID, INVALID)]
CASES += [(path, VALID) for path in ("/v1/models", "/v1/models/{name}", "/health", "/metrics", "/")]
few = settings(max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def served():
    llm = LLM(progress=False, num_gpu_blocks_override=32, max_num_seqs=8)
    with serve(llm, max_tokens=3, max_n=2) as (url, service):
        yield schemathesis.openapi.from_url(url + "/openapi.json"), service
        assert_all_given_back(service)


@pytest.mark.parametrize("route, mode", CASES)
def test_no_request_breaks_the_server(served, route, mode):
    schema, service = served
    operation = next(found for result in schema.get_all_operations() if (found := result.ok()).path == route)
    statuses = set()

    @few
    @given(case=operation.as_strategy(generation_mode=mode))
    def fuzz(case):
        response = case.call(timeout=30)
        case.validate_response(response, checks=[not_a_server_error])
        statuses.add(response.status_code)

    fuzz()
    assert statuses and service.engine.is_alive
