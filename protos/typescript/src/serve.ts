// A reward service in a few lines: scorers are functions, and everything that reward.proto promises beside them is here.
import { createServer, type Http2Server, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";
import { create, type DescMethodUnary, type DescService, type MessageInitShape } from "@bufbuild/protobuf";
import { fileDesc, serviceDesc } from "@bufbuild/protobuf/codegenv2";
import { Code, ConnectError } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { RewardService, ScoreResultSchema, type ScoreItem } from "../api/headrace/api/reward/v1/reward_pb.js";

const MAX_ITEMS = 4_096;
// The descriptor of grpc.health.v1's Check, which is in no package of ours: protoc --descriptor_set_out, in base64.
const HEALTH = serviceDesc(
  fileDesc(
    "ChtncnBjL2hlYWx0aC92MS9oZWFsdGgucHJvdG8SDmdycGMuaGVhbHRoLnYxIi4KEkhlYWx0aENoZWNrUmVxdWVzdBIYCgdzZXJ2aWNlGAEgAS" +
    "gJUgdzZXJ2aWNlIrEBChNIZWFsdGhDaGVja1Jlc3BvbnNlEkkKBnN0YXR1cxgBIAEoDjIxLmdycGMuaGVhbHRoLnYxLkhlYWx0aENoZWNrUmVz" +
    "cG9uc2UuU2VydmluZ1N0YXR1c1IGc3RhdHVzIk8KDVNlcnZpbmdTdGF0dXMSCwoHVU5LTk9XThAAEgsKB1NFUlZJTkcQARIPCgtOT1RfU0VSVk" +
    "lORxACEhMKD1NFUlZJQ0VfVU5LTk9XThADMloKBkhlYWx0aBJQCgVDaGVjaxIiLmdycGMuaGVhbHRoLnYxLkhlYWx0aENoZWNrUmVxdWVzdBoj" +
    "LmdycGMuaGVhbHRoLnYxLkhlYWx0aENoZWNrUmVzcG9uc2ViBnByb3RvMw==",
  ),
  0,
);
const CHECK = (HEALTH as DescService).method["check"] as DescMethodUnary;
const SERVING = 1; // HealthCheckResponse.ServingStatus
const SERVICE_UNKNOWN = 3;
const MAX_MESSAGE_BYTES = 256 << 20;

/** A response to score. */
export interface Item {
  prompt: string; // text, or a JSON array of messages
  response: string;
  label: string | undefined;
  metadata: Record<string, unknown>;
  status: string;
}

export interface Scorer {
  name: string;
  /** Another one whenever the scores may be others. */
  version: string;
  description?: string;
  /** The reward, finite. What it throws is that sample's failure, and never a reward of 0. */
  score: (item: Item) => number | Promise<number>;
}

export interface RewardServer {
  address: string;
  /** Ends it, and the calls on their way. */
  close(): Promise<void>;
}

type Result = NonNullable<MessageInitShape<typeof ScoreResultSchema>["result"]>;

/** Serves at `host:port` (port 0: a free one), without encryption. The first scorer is the default. */
export async function serveReward(address: string, ...scorers: [Scorer, ...Scorer[]]): Promise<RewardServer> {
  const [, host, port] = /^(.+):(\d{1,5})$/.exec(address) ?? [];
  if (host === undefined) throw new RangeError(`address ${address} is not host:port, e.g. 127.0.0.1:7010`);
  const known = new Map(scorers.map((scorer) => [scorer.name, scorer]));
  const handler = connectNodeAdapter({
    connect: false,
    grpcWeb: false,
    readMaxBytes: MAX_MESSAGE_BYTES,
    writeMaxBytes: MAX_MESSAGE_BYTES,
    routes: (router) =>
      router
        .service(RewardService, {
          score: async ({ items, scorer }) => {
            checkItems(items);
            const chosen = scorer ? known.get(scorer) : scorers[0];
            if (!chosen) throw new ConnectError(`there is no scorer ${scorer}: there are ${names(known)}`, Code.NotFound);
            const results = items.map(async (item) =>
              create(ScoreResultSchema, { itemId: item.itemId, result: await resultOf(item, chosen) }),
            );
            return { results: await Promise.all(results) };
          },
          listScorers: () => ({
            scorers: [...known.values()]
              .sort((a, b) => (a.name < b.name ? -1 : 1))
              .map(({ name, version, description }) => ({
                name, version, description: description ?? "", isDefault: name === scorers[0].name,
              })),
          }),
        })
        .rpc(CHECK, (request: any) => create(CHECK.output, { status: healthOf(request.service) })),
  });
  return listening(createServer(handler), host, Number(port));
}

function checkItems(items: ScoreItem[]): void {
  if (items.length < 1 || items.length > MAX_ITEMS)
    throw new ConnectError(`${items.length} items: send 1 to ${MAX_ITEMS} in a call`, Code.InvalidArgument);
  if (new Set(items.map(({ itemId }) => itemId)).size < items.length)
    throw new ConnectError("two items have the same item_id: it must be unique in the call", Code.InvalidArgument);
}

async function resultOf(item: ScoreItem, { name, version, score }: Scorer): Promise<Result> {
  const failure = (reason: string, message: string): Result => ({ case: "error", value: { reason, message } });
  let metadata: unknown;
  try {
    metadata = JSON.parse(item.metadataJson || "{}");
  } catch {
    metadata = undefined;
  }
  if (typeof metadata !== "object" || metadata === null || Array.isArray(metadata))
    return failure("ITEM_INVALID", "metadata_json is not a JSON object");
  const { prompt, response, label, status } = item;
  try {
    const value = await score({ prompt, response, label, metadata: metadata as Record<string, unknown>, status });
    if (!Number.isFinite(value)) return failure("SCORER_NOT_FINITE", `scorer ${name} gave ${value}`);
    return { case: "score", value: { value, scorer: name, scorerVersion: version } };
  } catch (error) {
    return failure("SCORER_RAISED", `scorer ${name} threw ${error}`);
  }
}

function healthOf(service: string): number {
  return service === "" || service === RewardService.typeName ? SERVING : SERVICE_UNKNOWN;
}

function names(known: Map<string, Scorer>): string {
  return [...known.keys()].sort().join(", ");
}

async function listening(server: Http2Server, host: string, port: number): Promise<RewardServer> {
  const sessions = new Set<ServerHttp2Session>();
  server.on("session", (session) => {
    sessions.add(session);
    session.on("close", () => sessions.delete(session));
  });
  await new Promise<void>((resolve, reject) => {
    server.once("error", reject);
    server.listen(port, host.replace(/^\[|\]$/g, ""), resolve);
  });
  return {
    address: `${host}:${(server.address() as AddressInfo).port}`,
    close: () =>
      new Promise((resolve) => {
        server.close(() => resolve());
        for (const session of sessions) session.destroy();
      }),
  };
}
