// The clients of a run. Methods, messages and fields have their names in protos/, whose comments are the reference.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Client } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { BufferService } from "../api/headrace/api/buffer/v1/buffer_pb.js";
import { RewardService } from "../api/headrace/api/reward/v1/reward_pb.js";
import { RolloutService } from "../api/headrace/api/rollout/v1/rollout_pb.js";
import { TrainerService } from "../api/headrace/api/trainer/v1/trainer_pb.js";
import { patient } from "./calls.js";

export { HeadraceError } from "./calls.js";
export { serveReward, type Item, type RewardServer, type Scorer } from "./serve.js";
export { column, elements, pack, readSamples, type Elements } from "./samples.js";

export interface Options {
  /** Folder of ca.pem, cert.pem and key.pem. Default: HEADRACE_TLS_DIR; without either, calls are not encrypted. */
  tls?: string | undefined;
  /** A token of `headrace tokens add`. Default: HEADRACE_TOKEN. */
  token?: string | undefined;
}

/** The services at one address; a call of one that does not run there is UNIMPLEMENTED. */
export interface Services {
  buffer: Client<typeof BufferService>;
  rollout: Client<typeof RolloutService>;
  reward: Client<typeof RewardService>;
  trainer: Client<typeof TrainerService>;
  /** Ends the connection and its calls. A program that ends need not call it. */
  close(): void;
}

const SERVICE_NAME = "headrace"; // of each service's certificate, whatever its address
const MAX_MESSAGE_BYTES = 256 << 20;

/**
 * Connects to `host:port` at the first call. Each call has a deadline, waits for a service that is being restarted, and
 * throws HeadraceError. Throws a RangeError for an address of another form, and for a token without encryption.
 */
export function open(address: string, options: Options = {}): Services {
  const { tls = process.env["HEADRACE_TLS_DIR"], token = process.env["HEADRACE_TOKEN"] } = options;
  const host = /^(\[[0-9a-f:.]+\]|[^:,|/]+):\d{1,5}$/i.exec(address)?.[1];
  if (host === undefined) throw new RangeError(`address ${address} is not host:port, e.g. 127.0.0.1:9000`);
  if (token && !tls && !/^(localhost|\[::1\]|127\..*)$/.test(host))
    throw new RangeError(`a token is not sent unencrypted to ${host}: pass tls, the folder of the run's certificates`);
  const read = (name: string) => readFileSync(join(tls ?? "", name));
  const files = tls ? { ca: read("ca.pem"), cert: read("cert.pem"), key: read("key.pem"), servername: SERVICE_NAME } : {};
  const baseUrl = `${tls ? "https" : "http"}://${address}`;
  const sessionManager = new Http2SessionManager(baseUrl, { pingIntervalMs: 30_000, pingTimeoutMs: 20_000 }, files);
  const transport = createGrpcTransport({
    baseUrl,
    sessionManager,
    acceptCompression: [],
    readMaxBytes: MAX_MESSAGE_BYTES,
    writeMaxBytes: MAX_MESSAGE_BYTES,
    interceptors: [
      (next) => (request) => {
        if (token) request.header.set("authorization", `Bearer ${token}`);
        return next(request);
      },
    ],
  });
  return {
    buffer: patient(BufferService, transport, `the buffer at ${address}`),
    rollout: patient(RolloutService, transport, `the rollout service at ${address}`),
    reward: patient(RewardService, transport, `the reward service at ${address}`),
    trainer: patient(TrainerService, transport, `the trainer at ${address}`),
    close: () => sessionManager.abort(),
  };
}
