"""gRPC, kept to one place: servers, channels with deadlines, errors and columns on the wire.

`server` is not imported here: clients need no server.
"""

from nereus_common.rpc.channels import DeadlineChannel
from nereus_common.rpc.columns import Columns, chunks_from_columns, columns_from_chunks
from nereus_common.rpc.errors import calling, error_of, raise_from_rpc, status_of

__all__ = [
    "Columns",
    "DeadlineChannel",
    "calling",
    "chunks_from_columns",
    "columns_from_chunks",
    "error_of",
    "raise_from_rpc",
    "status_of",
]
