"""An XLA FFI handler in ctypes: from XLA's call frame to a launcher in Python.

The structs are those of xla/ffi/api/c_api.h, as far as they are read here: a stable C ABI, the
same from jaxlib 0.6 to 0.11. A launcher gets the call's attribute, the device, the stream, and
the addresses of operands and results; what it raises comes out of the program as an error.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from typing import Any

import jax

Launcher = Callable[[bytes, int, int, list[int]], None]
"""(attribute, device ordinal, stream, addresses of the operands and then of the results)"""

ATTRIBUTE = "program"
_METADATA = 1  # XLA_FFI_Extension_Metadata
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
_COMMAND_BUFFER_COMPATIBLE = 1
_INVALID_ARGUMENT, _INTERNAL = 3, 13
_API_VERSION = (0, 1)  # the oldest that has all that is used here


class _Extension(Structure):
    _fields_ = [("struct_size", c_size_t), ("type", c_int), ("next", c_void_p)]


class _ApiVersion(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("major", c_int),
        ("minor", c_int),
    ]


class _Metadata(Structure):
    _fields_ = [("struct_size", c_size_t), ("api_version", _ApiVersion), ("traits", c_uint32)]


class _MetadataExtension(Structure):
    _fields_ = [("base", _Extension), ("metadata", POINTER(_Metadata))]


class _Buffer(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    ]


class _Buffers(Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("buffers", POINTER(POINTER(_Buffer))),
    ]


class _Text(Structure):
    _fields_ = [("start", c_void_p), ("size", c_size_t)]


class _Attributes(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("names", c_void_p),
        ("values", POINTER(POINTER(_Text))),  # ours is a string
    ]


class _ErrorArguments(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("message", c_char_p),
        ("code", c_int),
    ]


class _StreamArguments(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("context", c_void_p),
        ("stream", c_void_p),
    ]


class _OrdinalArguments(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("context", c_void_p),
        ("ordinal", c_int32),
    ]


_Function = ctypes.CFUNCTYPE(c_void_p, c_void_p)  # arguments -> XLA_FFI_Error*, null for none


class _Api(Structure):
    """XLA_FFI_Api: the functions that are called here, at their places among the others."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("version", _ApiVersion),
        ("internal", c_void_p),
        ("error_create", _Function),
        ("_1", c_void_p * 3),
        ("stream_get", _Function),
        ("_2", c_void_p * 12),
        ("device_ordinal_get", _Function),
    ]


class _CallFrame(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("extension_start", POINTER(_Extension)),
        ("api", POINTER(_Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("operands", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    ]


_registered: list[Any] = []  # handlers: XLA keeps their addresses for as long as the process lives


def register(target: str, platform: str, launcher: Launcher, capturable: bool) -> None:
    """Make `target` a custom call of `platform` ("cpu", "CUDA") that runs `launcher`.

    `capturable` promises that the launcher queues the same work at each call with the same
    attribute and addresses, so that XLA may record it once in a command buffer (a CUDA graph).
    """
    on_device = platform != "cpu"

    def work(frame: _CallFrame) -> None:
        device, stream = _place(frame) if on_device else (0, 0)
        text = frame.attributes.values[0].contents
        addresses = [*_addresses(frame.operands), *_addresses(frame.results)]
        launcher(ctypes.string_at(text.start, text.size), device, stream, addresses)

    def handler(address: int) -> int | None:
        frame = _CallFrame.from_address(address)
        if frame.extension_start and frame.extension_start.contents.type == _METADATA:
            _describe(frame, capturable)
        elif frame.stage == _EXECUTE:
            try:
                work(frame)
            except BaseException as error:  # noqa: BLE001  XLA's C++ calls this
                return _error(frame, error)
        return None

    function = _Function(_guarded(handler))
    _registered.append(function)
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform=platform)


def _guarded(handler: Callable[[int], int | None]) -> Any:
    """`handler`, whose result is an error's address even if it is interrupted before its first line.

    A Ctrl-C during XLA's C++ is raised as soon as Python runs again: on entry to the handler, out
    of reach of its `try`. ctypes would return to XLA whatever was in memory then. So the handler
    is called by ctypes, through a function without a result; that it got to its end is noted here.
    """
    results: dict[int, int | None] = {}  # by thread

    def noting(address: int) -> None:
        results[threading.get_ident()] = handler(address)

    def result(_: None, __: Any, arguments: tuple[int]) -> int | None:
        thread = threading.get_ident()
        if thread in results:
            return results.pop(thread)
        frame = _CallFrame.from_address(arguments[0])
        return _error(frame, KeyboardInterrupt("the call was interrupted before it began"))

    guarded: Any = ctypes.PYFUNCTYPE(None, c_void_p)(noting)
    guarded.errcheck = result
    return guarded


def _describe(frame: _CallFrame, capturable: bool) -> None:
    extension = ctypes.cast(frame.extension_start, POINTER(_MetadataExtension)).contents
    metadata = extension.metadata.contents
    metadata.api_version.major, metadata.api_version.minor = _API_VERSION
    metadata.traits = _COMMAND_BUFFER_COMPATIBLE if capturable else 0


def _place(frame: _CallFrame) -> tuple[int, int]:
    """The device's ordinal and the stream."""
    api = frame.api.contents
    ordinal = _OrdinalArguments(ctypes.sizeof(_OrdinalArguments), None, frame.context, 0)
    stream = _StreamArguments(ctypes.sizeof(_StreamArguments), None, frame.context, None)
    for function, arguments in ((api.device_ordinal_get, ordinal), (api.stream_get, stream)):
        if function(ctypes.addressof(arguments)):
            raise RuntimeError("XLA did not say on which device and stream the call runs")
    return int(ordinal.ordinal), stream.stream or 0


def _addresses(buffers: _Buffers) -> list[int]:
    # an empty buffer may have no address
    return [buffers.buffers[i].contents.data or 0 for i in range(buffers.size)]


def _error(frame: _CallFrame, error: BaseException) -> int:
    code = _INVALID_ARGUMENT if isinstance(error, (TypeError, ValueError)) else _INTERNAL
    message = f"{type(error).__name__}: {error}".encode()
    arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, message, code)
    created: int = frame.api.contents.error_create(ctypes.addressof(arguments))
    return created
