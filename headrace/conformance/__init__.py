"""Whether a service keeps the contract of the protos: `headrace conformance SERVICE ADDRESS`.

The checks speak gRPC and know nothing of how a service is built, so they hold for one in any language.
"""
