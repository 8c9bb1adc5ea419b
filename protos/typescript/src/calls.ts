// Deadlines, retries and errors of all calls.
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { fromBinary, type DescService } from "@bufbuild/protobuf";
import { BinaryReader, WireType } from "@bufbuild/protobuf/wire";
import { DurationSchema } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, createClient, type CallOptions, type Client, type Transport } from "@connectrpc/connect";

const DEADLINE_MS = 300_000;
const BROKEN = [Code.Unavailable, Code.Aborted, Code.Canceled, Code.Internal]; // said on this side: the connection broke

/** `status` is NOT_FOUND, UNAVAILABLE, …; `reason` says more to a program: FENCED, DISK_FULL, … */
export class HeadraceError extends Error {
  override name = "HeadraceError";
  constructor(message: string, readonly status: string, readonly reason = status, readonly retryAfterSeconds = 0) {
    super(message);
  }
}

/** The generated client, whose calls wait for a service that is away. `timeoutMs` is a call's deadline; 0: none. */
export function patient<S extends DescService>(service: S, transport: Transport, peer: string): Client<S> {
  const client = createClient(service, transport) as Record<string, any>;
  for (const { localName, methodKind, input } of service.methods) {
    const rpc = client[localName];
    const hasKey = input.fields.some((field) => field.localName === "requestId");
    const keyed = (request: object) => (hasKey ? { requestId: randomUUID(), ...request } : request);
    const unary = (request: object, options: CallOptions = {}) => {
      const same = keyed(request);
      return retryUntil(peer, options, (timeoutMs) => rpc(same, { ...options, timeoutMs }));
    };
    const stream = async function* (request: object, options: CallOptions = {}) {
      const left = new AbortController();
      const signal = AbortSignal.any([left.signal, ...(options.signal ? [options.signal] : [])]);
      let replies: AsyncIterator<unknown> | undefined;
      const first = (timeoutMs: number): Promise<IteratorResult<unknown>> => {
        replies = rpc(request, { ...options, timeoutMs, signal })[Symbol.asyncIterator]() as AsyncIterator<unknown>;
        return replies.next();
      };
      try {
        let reply = await retryUntil(peer, options, first);
        for (; !reply.done; reply = await replies!.next()) yield reply.value;
      } catch (error) {
        throw errorOf(error, peer);
      } finally {
        left.abort(); // a reader that leaves ends the call, and with one more message its timer
        replies?.next().catch(() => undefined);
      }
    };
    client[localName] = methodKind === "unary" ? unary : stream;
  }
  return client as Client<S>;
}

async function retryUntil<T>(peer: string, options: CallOptions, attempt: (timeoutMs: number) => Promise<T>): Promise<T> {
  const end = performance.now() + ((options.timeoutMs ?? DEADLINE_MS) || Infinity);
  for (let pauseMs = 100, cause: HeadraceError | undefined; ; pauseMs = Math.min(2 * pauseMs, 2000)) {
    try {
      return await attempt(end === Infinity ? 0 : Math.max(Math.round(end - performance.now()), 1));
    } catch (caught) {
      const error = errorOf(caught, peer);
      if (cause === undefined || error.status !== "DEADLINE_EXCEEDED") cause = error;
      const isAway = error.status === "UNAVAILABLE" || error.reason === "DISK_FULL";
      const waitMs = Math.max(pauseMs * (0.5 + Math.random() / 2), error.retryAfterSeconds * (1000 + 250 * Math.random()));
      if (!isAway || options.signal?.aborted || performance.now() + waitMs >= end) throw cause;
      await sleep(waitMs);
    }
  }
}

function errorOf(cause: unknown, peer: string): HeadraceError {
  if (cause instanceof HeadraceError) return cause;
  const error = ConnectError.from(cause);
  const info = detail(error, "ErrorInfo"), retry = detail(error, "RetryInfo");
  if (!info && BROKEN.includes(error.code))
    return new HeadraceError(`${peer} cannot be reached: ${error.rawMessage}`, "UNAVAILABLE");
  const status = Code[error.code]!.replace(/\B[A-Z]/g, "_$&").toUpperCase();
  const message = status === "DEADLINE_EXCEEDED" && !info ? `${peer} gave no answer in time` : error.rawMessage;
  const delay = retry && fromBinary(DurationSchema, retry);
  return new HeadraceError(message, status, info && new TextDecoder().decode(info), delay && Number(delay.seconds) + delay.nanos / 1e9);
}

/** Field 1 of google.rpc.NAME in a google.rpc.Status: an ErrorInfo's reason, a RetryInfo's delay. */
function detail(error: ConnectError, name: string): Uint8Array | undefined {
  for (const each of error.details)
    if ("type" in each && each.type === `google.rpc.${name}`)
      for (const reader = new BinaryReader(each.value); reader.pos < reader.len; ) {
        const [field, type] = reader.tag();
        if (field === 1 && type === WireType.LengthDelimited) return reader.bytes();
        reader.skip(type);
      }
  return undefined;
}
