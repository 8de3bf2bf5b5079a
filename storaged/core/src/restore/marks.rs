//! High-water marks: the highest checkpoint of each namespace that is known to have been protected. A plan does not go
//! below it while nodes that may hold it have not answered. Home nodes tell everybody when a checkpoint becomes
//! protected, and whoever links up says what it knows; so any majority has a node that knows. A mark only rises. A
//! restart that was allowed to go below it opens a newer run, and whatever that protects ranks above.

use storaged_wire::peer::{CheckpointKey, HighMark, NamespaceMark, PeerMessage};
use storaged_wire::{CheckpointState, Namespace, NodeName};

use crate::context::Context;
use crate::limits;

impl Context {
    pub(crate) fn mark_of(&self, namespace: &Namespace) -> Option<HighMark> {
        self.namespaces.get(namespace)?.mark
    }

    /// The newest checkpoint of a job that this node knows to be protected, or more.
    pub(super) fn newest_protected(&self, namespace: &Namespace) -> Option<HighMark> {
        let mut newest_first = self.checkpoints.values().rev();
        let found = newest_first.find(|checkpoint| {
            let is_safe = checkpoint.state >= CheckpointState::Protected;
            checkpoint.key.namespace == *namespace && is_safe
        });
        found.map(|checkpoint| checkpoint.key.mark())
    }

    pub(crate) fn copied_of(&self, namespace: &Namespace) -> Option<HighMark> {
        self.namespaces.get(namespace)?.copied
    }

    /// A shard of a checkpoint is in the durable tier. Its home nodes hear that and may make it durable; should they be gone before
    /// they have told of it, a plan would offer what is older from RAM.
    pub(crate) fn note_copied(&mut self, key: &CheckpointKey) {
        let Some(table) = self.namespaces.get_mut(&key.namespace) else {
            return;
        };
        let copied = Some(key.mark());
        if table.copied < copied && !planted!("copies_not_remembered") {
            table.copied = copied;
            self.keeping.touch_job(&key.namespace);
        }
    }

    /// A checkpoint is as safe as nodes can make it: nothing below it is offered unasked from now on.
    pub(crate) fn raise_mark(&mut self, key: &CheckpointKey) {
        let Some(table) = self.namespaces.get_mut(&key.namespace) else {
            return;
        };
        let mark = key.mark();
        if table.mark >= Some(mark) {
            return;
        }
        table.mark = Some(mark);
        self.keeping.touch_job(&key.namespace);
        if self.homes_of(key).contains(self.me()) {
            let told = self.namespace_mark(&key.namespace);
            self.send_all(&PeerMessage::Marks(told.into_iter().collect()));
        }
    }

    fn namespace_mark(&self, namespace: &Namespace) -> Option<NamespaceMark> {
        let table = self.namespaces.get(namespace)?;
        Some(NamespaceMark {
            namespace: namespace.clone(),
            owner: table.owner,
            mark: table.mark?,
        })
    }

    /// What a peer that has just come up may not know.
    pub(crate) fn tell_marks(&mut self, node: &NodeName) {
        let namespaces = self.namespaces.keys();
        let marks: Vec<NamespaceMark> = namespaces
            .filter_map(|namespace| self.namespace_mark(namespace))
            .collect();
        for marks in marks.chunks(limits::FENCES_MAX) {
            self.send(node, PeerMessage::Marks(marks.to_vec()));
        }
    }

    /// One peer is enough: whoever is silent may be the only other one that knows. A mark that is made up has plans wait for nodes that do not
    /// answer, and be refused if these do not come up.
    pub(crate) fn learn_marks(&mut self, from: &NodeName, marks: Vec<NamespaceMark>) {
        for told in marks {
            let is_heard =
                self.checks_run(from, told.mark.run) && self.may_tell_of(from, &told.namespace);
            if is_heard && self.may_be_its(&told.namespace, told.owner) {
                let table = self.namespace_table(&told.namespace, told.owner);
                table.mark = table.mark.max(Some(told.mark));
            }
        }
    }
}
