"""A real S3 server on loopback, moto's: `python -m tests.server.node.s3_server`. Prints its port."""

from __future__ import annotations

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
    print(server.port, flush=True)
    server.serve_forever()
