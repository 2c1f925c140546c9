"""A device plugin with simulated GPUs that speaks the kubelet's real API (k8s.io/kubelet, deviceplugin/v1beta1).

`python -m testbed.device_plugin RESOURCE COUNT CONTROL_DIR`. A file CONTROL_DIR/<device> makes that
device Unhealthy; removing it makes the device Healthy again. The few messages are encoded by hand, so no generated code
is needed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc

_FOLDER = Path("/var/lib/kubelet/device-plugins")
_POLL_SECONDS = 0.1


def field(number: int, content: bytes) -> bytes:
    """One length-delimited protobuf field (wire type 2)."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """All length-delimited fields of a message; varints are skipped."""
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        value, position = _read_varint(message, position)
        if tag & 7 == 2:
            yield tag >> 3, message[position : position + value]
            position += value


def register_request(endpoint: str, resource: str) -> bytes:
    """RegisterRequest{version=1, endpoint=2, resource_name=3}."""
    return field(1, b"v1beta1") + field(2, endpoint.encode()) + field(3, resource.encode())


def device_list(devices: dict[str, bool]) -> bytes:
    """ListAndWatchResponse{devices=1: Device{ID=1, health=2}}."""
    return b"".join(
        field(1, field(1, name.encode()) + field(2, b"Healthy" if healthy else b"Unhealthy"))
        for name, healthy in devices.items()
    )


def allocate_response(request: bytes) -> bytes:
    """AllocateRequest{container_requests=1{devices_ids=1}} -> AllocateResponse{container_responses=1{envs=1}}."""
    answers = b""
    for number, container in fields(request):
        if number == 1:
            names = ",".join(value.decode() for kind, value in fields(container) if kind == 1)
            entry = field(1, b"TESTBED_GPUS") + field(2, names.encode())
            answers += field(1, field(1, entry))
    return answers


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


class Plugin:
    """The state of one resource on one node."""

    def __init__(self, resource: str, count: int, control: Path) -> None:
        self.resource = resource
        self.names = [f"gpu{index}" for index in range(count)]
        self.control = control
        control.mkdir(parents=True, exist_ok=True)

    def devices(self) -> dict[str, bool]:
        """Device to health."""
        return {name: not (self.control / name).exists() for name in self.names}

    def list_and_watch(self, _request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Stream the devices, again after every change."""
        last: dict[str, bool] | None = None
        while context.is_active():
            current = self.devices()
            if current != last:
                last = current
                yield device_list(current)
            time.sleep(_POLL_SECONDS)

    def handlers(self) -> grpc.GenericRpcHandler:
        """The v1beta1.DevicePlugin service."""
        return grpc.method_handlers_generic_handler(
            "v1beta1.DevicePlugin",
            {
                "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(lambda _request, _context: b""),
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(self.list_and_watch),
                "Allocate": grpc.unary_unary_rpc_method_handler(lambda request, _context: allocate_response(request)),
                "GetPreferredAllocation": grpc.unary_unary_rpc_method_handler(lambda _request, _context: b""),
                "PreStartContainer": grpc.unary_unary_rpc_method_handler(lambda _request, _context: b""),
            },
        )

    def serve_once(self) -> None:
        """Serve and register; return when the kubelet was restarted (it wipes the folder)."""
        endpoint = self.resource.replace("/", "_") + ".sock"
        path = _FOLDER / endpoint
        path.unlink(missing_ok=True)
        server = grpc.server(futures.ThreadPoolExecutor(8))
        server.add_generic_rpc_handlers((self.handlers(),))
        server.add_insecure_port(f"unix://{path}")
        server.start()
        try:
            with grpc.insecure_channel(f"unix://{_FOLDER}/kubelet.sock") as channel:
                register = channel.unary_unary("/v1beta1.Registration/Register")
                register(register_request(endpoint, self.resource), timeout=5)
            kubelet, own = _inode(_FOLDER / "kubelet.sock"), _inode(path)
            while _inode(_FOLDER / "kubelet.sock") == kubelet and _inode(path) == own:
                time.sleep(_POLL_SECONDS)
        finally:
            stopped: threading.Event = server.stop(0)
            stopped.wait(2)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def main() -> None:
    """Serve for ever; a kubelet that is not there yet is waited for."""
    plugin = Plugin(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    while True:
        if (_FOLDER / "kubelet.sock").exists():
            try:
                plugin.serve_once()
            except grpc.RpcError as error:
                sys.stderr.write(f"device plugin: {error}\n")
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
