"""How two coordinators end one operation: attempts of both, whose records reach its holders in any order, or never.

The holders are the nodes' records (`OperationLog`), and the coordinators what counts their answers (`Attempt`). One
holder may restart, and answers may be lost. Whatever happens, all that end the operation end it in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from google.longrunning.operations_pb2 import Operation
from google.rpc.status_pb2 import Status

from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.coordinator.operations.operation import Attempt
from lmkv_server.node.commands.operation_log import OperationLog
from tests.models.explorer import Action

NAME = "clear-1"
MAX_ATTEMPTS = 3


class Coordinator:
    """A coordinator that knows the operation. Each end that it makes up says who made it."""

    def __init__(self, name: str, holder_ids: Sequence[str]) -> None:
        self.name = name
        self.number = 0
        """Of its attempt; 0 without one."""
        self.known_number = 1
        """The highest attempt that it knows."""
        self.answers: Attempt | None = None
        self.proposal = ""
        self.heard: list[tuple[str, bool]] = []
        """Holders that were asked in this attempt, and whether they answered; once more for its end."""
        self.end = ""
        """How it says that the operation ended."""
        self.informed: list[str] = []
        """Holders that it has sent the end to."""
        self._holder_ids = holder_ids

    def begin(self, number: int) -> None:
        """Makes an attempt."""
        self.number = self.known_number = number
        self.answers = Attempt(number, self._holder_ids)
        self.proposal = ""
        self.heard = []

    def record(self) -> pb.OperationRecord:
        """The record of its attempt, or of the end."""
        record = pb.OperationRecord(
            operation=Operation(name=NAME, done=bool(self.end)), attempt=self.number, coordinator_id=self.name
        )
        if self.end:
            record.operation.error.message = self.end
        elif self.proposal:
            record.proposed_end.CopyFrom(
                pb.ProposedEnd(
                    operation=Operation(name=NAME, done=True, error=Status(message=self.proposal)),
                    attempt=self.number,
                    coordinator_id=self.name,
                )
            )
        return record

    def ask(self, holder_id: str, log: OperationLog, *, is_gone: bool, answers: bool) -> None:
        """Has a holder store the record; its answer may be lost."""
        assert self.answers is not None
        self.heard.append((holder_id, bool(self.proposal)))
        sent = self.record()
        kept = log.put(sent, self.name)
        if is_gone:
            self.answers.is_gone(holder_id)
        if not answers:
            self.answers.unanswered(holder_id, sent)
            return
        self.answers.answered(holder_id, sent, kept)
        if newer := self.answers.newer:
            self.known_number = max(self.known_number, newer.attempt)
            if newer.operation.done:
                self.end = newer.operation.error.message
        if self.proposal and not self.end and self.answers.has_ended:
            self.end = self.proposal

    def propose(self) -> None:
        """Has done its work, unless an end was accepted already."""
        assert self.answers is not None
        accepted = self.answers.accepted_end
        self.proposal = accepted.operation.error.message if accepted else f"{self.name}{self.number}"

    def state(self) -> object:
        """What its later behaviour depends on."""
        return (
            self.number,
            self.known_number,
            self.proposal,
            sorted(self.heard),
            self.end,
            sorted(self.informed),
            _shown(self.answers),
        )


class OperationEndModel:
    """The operation, begun by coordinator A; B may take it over, and A again."""

    def __init__(self, holder_count: int) -> None:
        self._logs = {f"h{number}": OperationLog() for number in range(holder_count)}
        self._gone: set[str] = set()
        self._coordinators = {name: Coordinator(name, list(self._logs)) for name in "AB"}
        self._attempt_count = 1
        self._coordinators["A"].begin(1)

    def actions(self) -> Sequence[Action]:
        """See `Model`."""
        found: list[Action] = [("restart", holder) for holder in self._logs if not self._gone]
        for name, one in self._coordinators.items():
            if not one.end and self._attempt_count < MAX_ATTEMPTS:
                found.append(("take_over", name))
            if one.end:
                found += [("inform", name, holder) for holder in self._logs if holder not in one.informed]
            if one.answers is None or one.answers.newer or one.end:
                continue
            if not one.proposal and one.answers.may_begin:
                found.append(("propose", name))
            for holder in self._logs:
                if (holder, bool(one.proposal)) not in one.heard:
                    found += [("ask", name, holder), ("ask_in_vain", name, holder)]
        return found

    def apply(self, action: Action) -> None:
        """See `Model`."""
        match action:
            case ("restart", str(holder)):
                self._logs[holder] = OperationLog()
                self._gone.add(holder)
            case ("take_over", str(name)):
                self._attempt_count += 1
                self._coordinators[name].begin(self._coordinators[name].known_number + 1)
            case ("propose", str(name)):
                self._coordinators[name].propose()
            case ("ask" | "ask_in_vain" as how, str(name), str(holder)):
                self._ask(self._coordinators[name], holder, answers=how == "ask")
            case ("inform", str(name), str(holder)):
                one = self._coordinators[name]
                one.informed.append(holder)
                self._logs[holder].put(one.record(), name)

    def fingerprint(self) -> object:
        """See `Model`."""
        logs = {holder: [_record(one) for one in log.since(0, "A")] for holder, log in self._logs.items()}
        return logs, sorted(self._gone), self._attempt_count, [one.state() for one in self._coordinators.values()]

    def check(self) -> None:
        """Asserts that there is one end."""
        ends = {one.end for one in self._coordinators.values() if one.end}
        assert len(ends) <= 1, f"the operation ended in {len(ends)} ways: {sorted(ends)}"
        for log in self._logs.values():
            log.check()

    def settle(self) -> None:
        """Another coordinator reaches all holders, and ends the operation as it has ended before."""
        last = self._coordinators["S"] = Coordinator("S", list(self._logs))
        last.begin(MAX_ATTEMPTS + 2)
        for _ in range(2):
            for holder in self._logs:
                self._ask(last, holder)
            assert last.answers is not None
            if not last.end and last.answers.may_begin and not last.proposal:
                last.propose()
        assert last.answers is not None
        assert last.end or last.answers.is_hopeless, "it cannot be ended, though enough holders answer"
        self.check()

    def _ask(self, one: Coordinator, holder: str, *, answers: bool = True) -> None:
        if not one.end:
            one.ask(holder, self._logs[holder], is_gone=holder in self._gone, answers=answers)


def _record(record: pb.OperationRecord) -> object:
    end = record.proposed_end
    proposed = (end.attempt, end.coordinator_id, end.operation.error.message)
    return record.attempt, record.coordinator_id, proposed, record.operation.done, record.operation.error.message


def _shown(answers: Attempt | None) -> object:
    if answers is None:
        return None
    accepted = answers.accepted_end.operation.error.message if answers.accepted_end else ""
    counted = [sorted(one) for one in (answers._begun, answers._ended, answers._gone)]
    return counted, answers.newer is not None, accepted, answers.may_begin, answers.has_ended


TWO_HOLDERS = partial(OperationEndModel, 2)
THREE_HOLDERS = partial(OperationEndModel, 3)
