"""A reward service of one's own: gRPC and headrace's protos, and no headrace. It runs in a Python that has none.

The stubs are generated from protos/ (README.md). Any language with gRPC can do the same.
"""

import sys
from concurrent import futures

import grpc

from headrace.api.reward.v1 import reward_pb2 as pb  # of the folder `stubs`
from headrace.api.reward.v1 import reward_pb2_grpc

NAME, VERSION = "close", "1"


def worth(response, label):
    """1 for the right number, less the farther a number is from it, 0 without a number."""
    try:
        return 1.0 / (1 + abs(int(response.strip()) - int(label)))
    except ValueError:
        return 0.0


class Close(reward_pb2_grpc.RewardServiceServicer):
    def Score(self, request, context):
        return pb.ScoreResponse(results=[self.result(item) for item in request.items])

    def result(self, item):
        """A score, or an error: that sample fails, and is never trained as a reward of 0."""
        if not item.HasField("label"):
            return pb.ScoreResult(
                item_id=item.item_id, error=pb.ScoreError(reason="ITEM_INVALID", message="there is no label")
            )
        score = pb.Score(value=worth(item.response, item.label), scorer=NAME, scorer_version=VERSION)
        return pb.ScoreResult(item_id=item.item_id, score=score)

    def ListScorers(self, request, context):
        scorer = pb.Scorer(name=NAME, version=VERSION, description="How close the number is.", is_default=True)
        return pb.ListScorersResponse(scorers=[scorer])


def serve(address):
    server = grpc.server(futures.ThreadPoolExecutor(4))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(Close(), server)
    port = server.add_insecure_port(address)
    server.start()
    print(f"{NAME} listens on port {port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    serve(sys.argv[1])
