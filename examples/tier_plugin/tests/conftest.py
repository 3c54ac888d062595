"""A server of the S3 protocol on the loopback interface, with one bucket."""

import logging

import boto3
import pytest
from moto.server import ThreadedMotoServer

from oasiskv.testing.backends import BACKENDS

BUCKET = "kv-cache"


@pytest.fixture(params=BACKENDS)
def anyio_backend(request):
    return request.param


@pytest.fixture(scope="session", autouse=True)
def endpoint():
    """The URL of the server."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    patch = pytest.MonkeyPatch()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }.items():
        patch.setenv(name, value)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def client(endpoint):
    """A client beside the store, to look at the objects and to damage them."""
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=BUCKET)
    yield client
    client.close()


@pytest.fixture
def location(endpoint, tmp_path):
    """A place of this test's own."""
    return f"s3:{BUCKET}{tmp_path}?endpoint={endpoint}"
