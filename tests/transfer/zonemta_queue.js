// Runs ZoneMTA's own queue on a LevelDB: one message, delivered to the first of three recipients, deferred for the
// second, not tried for the third, and one from the null sender.
//
//     NODE_CONFIG_DIR=…/zone-mta/config node zonemta_queue.js HOME DIRECTORY
//
// Its default engine, a fork of Basho's LevelDB, builds on no Node of today; leveldown is the other one that it takes.
'use strict';
const path = require('path');
const util = require('util');
// What it was written for; gone from Node 23 on.
for (const name of ['isRegExp', 'isDate']) util[name] = util[name] || util.types[name];
util.isArray = util.isArray || Array.isArray;
const home = process.argv[2];
const load = name => require(path.join(home, 'node_modules', name));
load('npmlog').level = 'silent';
const plugins = load('zone-mta/lib/plugins');
const MailQueue = load('zone-mta/lib/mail-queue');
const MailDrop = load('zone-mta/lib/mail-drop');
const handler = { runHooks: (name, args, done) => setImmediate(done), runAnalyzerHooks: (e, source, out) => source.pipe(out),
    runRewriteHooks: (e, splitter, out) => splitter.pipe(out), runStreamHooks: (e, source, out) => source.pipe(out) };
plugins.handler = handler;

const leveldown = load('leveldown');
const levelup = load('levelup');
const db = levelup(process.argv[3], { db: leveldown, createIfMissing: true, compression: true });
const queue = new MailQueue({ dbinstance: db });
const drop = new MailDrop(queue);

const body = 'From: a@example.org\r\nSubject: caf\xe9\r\n folded\r\n\r\n.dot \xff\r\n' + 'x'.repeat(70) .concat('\r\n').repeat(2000) + 'end\r\n';

const add = (from, to) => new Promise((done, fail) => {
    const id = queue.seqIndex.get();
    const envelope = { id, interface: 'feeder', from, to, origin: '192.0.2.1', originhost: '[192.0.2.1]', transhost: 'client.example.org',
        transtype: 'ESMTP', time: 1700000000250, user: 'app' };
    drop.add(envelope, Buffer.from(body, 'binary'), err => (err ? fail(err) : done(id)));
});
const shift = () => new Promise((done, fail) => queue.shift('default', {}, (err, delivery) => (err ? fail(err) : done(delivery))));

queue.init(async err => {
    if (err) throw err;
    const first = await add('a@example.org', ['a-good@example.net', 'bad@example.net', 'late+1@example.net']);
    const second = await add('', ['late@example.org']);
    const good = await shift();
    await new Promise((done, fail) => queue.releaseDelivery(good, e => (e ? fail(e) : done())));
    const bad = await shift();
    await new Promise((done, fail) => queue.deferDelivery(bad, 3600 * 1000, { response: '450 4.2.1 <x> mailbox busy' }, e => (e ? fail(e) : done())));
    console.log(first, second);
    if (process.argv[4] === 'wait') { setTimeout(() => process.exit(), 60000); return; }
    db.close(() => process.exit());
});
