"""placeholder"""

from cupyconv.plan import Plan
from cupyconv.planning.request import ChainRequest


def plan_chain(request: ChainRequest) -> Plan:
    raise NotImplementedError
