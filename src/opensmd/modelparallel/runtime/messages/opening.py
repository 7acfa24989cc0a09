"""Choosing a pipeline's transport."""

from __future__ import annotations

import torch
import torch.distributed as dist

from opensmd.collectives.mailbox import has_mailbox, spans_hosts
from opensmd.modelparallel.runtime.messages.group_transport import GroupTransport
from opensmd.modelparallel.runtime.messages.hosts_transport import HostsTransport
from opensmd.modelparallel.runtime.messages.mailbox_transport import MailboxTransport
from opensmd.modelparallel.runtime.messages.transport import Transport

__all__ = ["open_transport"]


def open_transport(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Return the transport for tensors on ``device`` among the ranks of ``group``."""
    if device.type == "cpu" and has_mailbox(group):
        return MailboxTransport(group)
    if device.type == "cpu" and spans_hosts(group):
        return HostsTransport(group)
    return GroupTransport(group, device)
